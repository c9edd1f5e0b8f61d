"""Calls to ranks over any transport. Calls go out in order. A rank that ends, for any reason, ends the others."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from quire.errors import EngineDeadError, QuireError, named_error
from quire.executors.interface import VitalSigns
from quire.executors.rank import EXECUTE, LAUNCH, SAMPLE, STEPS, RankAnswer, RankCall
from quire.executors.wire import decode, encode
from quire.step import SamplingInputs, StepPlan, StepResult

GRACE_SECONDS = 2.0
"""Seconds after a rank's error for the others to answer; then they count as waiting for the failed rank, and are
ended."""


class PendingCall:
    """Call (a plan or method) that went to every rank, until all have answered. decode: decodes an answer's body.
    answers: in rank order, None: not yet."""

    def __init__(self, method: str, decode: Callable[[msgspec.Raw], Any], num_ranks: int) -> None:
        self.method = method
        self.answers: list[RankAnswer | None] = [None] * num_ranks
        self.future: Future[list[Any]] = Future()
        self.future.set_running_or_notify_cancel()
        self._decode = decode

    @property
    def is_answered(self) -> bool:
        return None not in self.answers

    def error(self) -> QuireError | None:
        """Error of the first failed rank, with its number unless all ranks have the same error."""
        errors = [(rank, answer.error) for rank, answer in enumerate(self.answers) if answer and answer.error]
        if not errors:
            return None
        rank, error = errors[0]
        if error.error_type is None:
            return QuireError(f"rank {rank} failed: {error.message}")
        is_alike = len(errors) == len(self.answers) and all(other == error for _, other in errors)
        message = error.message if is_alike else f"rank {rank} failed: {error.message}"
        return named_error(error.error_type, message, error.param)

    def settle(self, death: EngineDeadError | None = None) -> None:
        """Complete the future with `death`, which explains the errors of others, else an error among the answers, else
        the answers."""
        if self.future.done():
            return
        error = death or self.error()
        if error is not None:
            self.future.set_exception(error)
            return
        try:
            results = [self._decode(answer.body) for answer in self.answers if answer is not None]
        except msgspec.DecodeError as mistake:  # the core waits for this future, so it must be completed
            self.future.set_exception(mistake)
        else:
            self.future.set_result(results)


class Pulse(Protocol):
    """Signs of life of one rank: seconds since the last, and whether its process is stopped."""

    def feel(self) -> VitalSigns:
        """Read the rank's signs since the last call, when the engine asks."""
        ...

    def close(self) -> None: ...


class RankCalls(ABC):
    """Implements `Workers` except the transport, which a subclass adds. One thread takes the answers."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._encoder = msgspec.msgpack.Encoder()
        self._decode_result = msgspec.msgpack.Decoder(StepResult).decode
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        """Guards the three attributes below; never held while sending, as a rank that cannot send does not read."""
        self._pending: deque[PendingCall] = deque()
        self._death: EngineDeadError | None = None
        self._is_closed = False
        self._unsent: PendingCall | None = None
        """Call of the last plan while it lacks its sampling inputs."""
        self._pulses: list[Pulse] = []
        self._feeling = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="quire-ranks", daemon=True)

    # -- the transport ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _send(self, message: bytes) -> None:
        """Send a call's bytes to every rank."""

    @abstractmethod
    def _arrived(self, seconds: float | None) -> Iterable[tuple[int, bytes | None]]:
        """Wait for at most `seconds` (None: for ever). Returns (rank, message) since the last call; None for a rank
        that has ended."""

    @abstractmethod
    def _explain_exit(self, rank: int) -> str:
        """Cause of a rank's end, for people."""

    @abstractmethod
    def _end_ranks(self) -> None:
        """End all ranks at once, without waiting."""

    @abstractmethod
    def _close(self) -> None:
        """Let the ranks end, wait for that, and release the transport."""

    # -- calls ------------------------------------------------------------------------------------------------------

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self._submit(PendingCall(method, decode, self._num_ranks), encode(arguments)).result()

    def execute(self, plan: StepPlan) -> Future[list[StepResult]]:
        body = self._encoder.encode(plan)
        if not plan.masked_samples:
            return self._submit(PendingCall(EXECUTE, self._decode_result, self._num_ranks), body)
        sampled = self._unsent = PendingCall(SAMPLE, self._decode_result, self._num_ranks)

        def note_failure(launched: Future[list[Any]]) -> None:  # on the reader's thread, which settles all calls
            if launched.exception() is not None:
                sampled.future.set_exception(launched.exception())

        self._submit(PendingCall(LAUNCH, bytes, self._num_ranks), body).add_done_callback(note_failure)
        return sampled.future

    def send_sampling_inputs(self, inputs: SamplingInputs) -> None:
        call, self._unsent = self._unsent, None
        if call is None:
            raise QuireError(f"no plan awaits sampling inputs, and those of step {inputs.step_id} came")
        if not call.future.done():
            self._submit(call, self._encoder.encode(inputs))

    def check(self) -> None:
        with self._lock:
            if self._death is not None:
                raise self._death.again()

    def vital_signs(self) -> VitalSigns:
        with self._feeling:
            signs = [pulse.feel() for pulse in self._pulses]
        return VitalSigns(
            max((each.silence for each in signs), default=0.0), min((each.stalled for each in signs), default=math.inf)
        )

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._death is None:
                self._death = EngineDeadError("the executor is shut down")
        self._close()
        with self._feeling:
            while self._pulses:
                self._pulses.pop().close()

    def _submit(self, call: PendingCall, body: bytes) -> Future[list[Any]]:
        message = self._encoder.encode(RankCall(call.method, msgspec.Raw(body)))
        with self._sending:
            with self._lock:
                if self._death is not None:
                    raise self._death.again()
                self._pending.append(call)
            self._send(message)
        return call.future

    def _read(self) -> None:
        """Take the ranks' answers until one of them ends, or fails while others wait for it."""
        answers = msgspec.msgpack.Decoder(RankAnswer)
        deadline: float | None = None
        while deadline is None or time.monotonic() < deadline:
            for rank, message in self._arrived(None if deadline is None else max(0.0, deadline - time.monotonic())):
                if message is None:
                    self._die(self._explain_exit(rank))
                    return
                failure = self._take(rank, answers.decode(message))
                if failure is not None:
                    self._die(f"a rank failed in a step: {failure}")
                    return
            deadline = (deadline or time.monotonic() + GRACE_SECONDS) if self._has_failure() else None
        with self._lock:
            failed = [call for call in self._pending if call.error() is not None]
            self._pending = deque(call for call in self._pending if call not in failed)
        for call in failed:
            call.settle()
        self._die(f"{failed[0].error()}; the other ranks waited for it")

    def _take(self, rank: int, answer: RankAnswer) -> QuireError | None:
        """Note a rank's answer to its oldest call, which the last answer completes; returns the error of a failed
        step."""
        with self._lock:
            call = next(call for call in self._pending if call.answers[rank] is None)
            call.answers[rank] = answer
            if not call.is_answered:
                return None
            self._pending.remove(call)
        call.settle()
        return call.error() if call.method in STEPS else None

    def _has_failure(self) -> bool:
        with self._lock:
            return any(call.error() is not None for call in self._pending)

    def _die(self, reason: str) -> None:
        with self._lock:
            if self._death is None:
                self._death = EngineDeadError(reason)
            pending = list(self._pending)
            self._pending.clear()
        self._end_ranks()
        for call in pending:
            call.settle(self._death.again())
