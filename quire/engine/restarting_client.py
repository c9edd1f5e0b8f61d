"""An EngineClient that survives its engine: when the engine dies or hangs, it starts another one, and every request
goes on.

It keeps of each live request what a new engine needs to go on with the same tokens: the request and what was generated
(`ResumePoint`). Text, stop strings and logprobs are the front end's and outlive the engine anyway. Registered prefixes
are registered again, open calls are asked again, and an engine that slept or was paused is so again. A request that
ends one engine after the other is found and ended (quire/engine/culprit_search.py).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.config.options import EngineOptions
from quire.engine.client import EngineClient
from quire.engine.culprit_search import CulpritSearch
from quire.engine.messages import (
    Abort,
    AddRequest,
    Call,
    CallResult,
    ClientMessage,
    EngineOutputs,
    EngineReady,
    RequestRejected,
)
from quire.engine.process_client import ProcessClient
from quire.errors import EngineDeadError, QuireError
from quire.logging import get_logger
from quire.outputs import SequenceUpdate
from quire.request import EngineRequest, FinishReason, ResumePoint
from quire.stats import EngineStats, carry_over

logger = get_logger(__name__)

StartEngine = Callable[[EngineReady | None, EngineStats | None], EngineClient]
"""Starts an engine. Its arguments: what the first one found, and the last that an engine counted; None at the first
start."""

MAX_STARTS = 3
"""Starts in a row that may fail."""
PAUSE_SECONDS = 1.0
"""Before the second start in a row; doubled before each further one."""
MAX_FRUITLESS_DEATHS = 20
"""Deaths in a row, with no token between them, after which the engine counts as dead. A search among 256 requests for
the one that ends the engine takes up to 18."""
WATCH_SECONDS = 1.0
"""How often the thread in `receive` looks whether the engine hangs."""
OWN_CALL = -1
"""Id of our own calls, by which a new engine sleeps or pauses as the one before; the front end's are positive."""
STATES = {"sleep": "sleep", "wake_up": "sleep", "pause": "pause", "resume": "pause"}
"""Method of a call -> the call that brings about the state that it begins or ends."""


def start_restarting(options: EngineOptions, executor: str, hung_engine_timeout: float) -> RestartingClient:
    """Engines in processes of their own, one after the other. The later ones have as many blocks as the first; where
    steps are logged, each writes a file of its own. hung_engine_timeout: as of RestartingClient."""
    numbers = itertools.count()

    def start(ready: EngineReady | None, stats: EngineStats | None) -> EngineClient:
        number = next(numbers)
        changes: dict[str, Any] = {}
        if ready is not None and ready.num_blocks:
            changes["num_blocks_override"] = ready.num_blocks
        if stats is not None and stats.num_host_blocks:
            changes["swap_space"] = stats.num_host_blocks * stats.block_bytes
        if number and options.step_log is not None:
            changes["step_log"] = f"{options.step_log}.{number}"
        return ProcessClient(msgspec.structs.replace(options, **changes), executor=executor)

    return RestartingClient(start, hung_engine_timeout)


@dataclass(slots=True)
class _LiveRequest:
    """A request that has not ended. arrival: of time.monotonic. generated, ended: by sequence; not of a beam search."""

    request: EngineRequest
    arrival: float
    generated: list[list[int]]
    ended: set[int] = field(default_factory=set)
    num_prompt_logprobs: int = 0
    is_sent: bool = False
    """Whether the engine that lives now has got it."""

    @classmethod
    def of(cls, request: EngineRequest) -> _LiveRequest:
        params = request.params
        num_reported = params.n if params.use_beam_search else params.num_sequences
        return cls(request, time.monotonic(), [[] for _ in range(num_reported)])

    @property
    def position(self) -> int:
        """Tokens of the longest sequence."""
        return max(map(len, self.generated))

    @property
    def is_over(self) -> bool:
        return len(self.ended) == len(self.generated)

    def note(self, update: SequenceUpdate) -> None:
        """Take what the engine reports."""
        self.generated[update.index] += update.new_token_ids
        if update.prompt_logprobs is not None:
            self.num_prompt_logprobs = update.prompt_logprobs.start + len(update.prompt_logprobs.entries)
        if update.finish_reason is not None:
            self.ended.add(update.index)

    def resumed(self) -> EngineRequest:
        """The request as a new engine gets it."""
        generated = self.generated
        if self.request.params.use_beam_search:  # hypotheses come at the end, all at once: it begins anew
            generated = [[] for _ in range(self.request.params.num_sequences)]
        age = time.monotonic() - self.arrival
        point = ResumePoint(generated, sorted(self.ended), self.num_prompt_logprobs, age)
        return msgspec.structs.replace(self.request, resume_point=point)


class RestartingClient:
    """Implements `EngineClient`. The thread in `receive` notices the death and starts the next engine; `send` never
    waits for that."""

    def __init__(self, start: StartEngine, hung_engine_timeout: float = 0.0) -> None:
        """Starts the first engine; a start that fails is an error, as without this class.

        hung_engine_timeout: seconds of silence (quire/engine/heartbeat.py) after which an engine is ended as one that
        hangs; 0: never. A long step is no silence, so no prompt is too long for it.
        """
        self._start = start
        self._hung_engine_timeout = hung_engine_timeout
        self._client = start(None, None)
        self._first_ready: EngineReady | None = None
        self._lock = threading.Lock()
        """Of everything below."""
        self._is_up = False
        """Whether `_client` takes messages."""
        self._live: dict[str, _LiveRequest] = {}
        self._prefixes: dict[str, EngineRequest] = {}
        """Registered prefixes, as they were asked for."""
        self._calls: dict[int, Call] = {}
        self._states: dict[str, str] = {}
        """The calls, with their arguments, that bring about the state that the engine was told to be in."""
        self._search = CulpritSearch()
        self._stats_before: EngineStats | None = None
        """What the engines that have ended had counted."""
        self._stats: EngineStats | None = None
        self._num_fruitless = 0
        """Deaths since the last token."""
        self._unreported: list[RequestRejected] = []
        self._death: EngineDeadError | None = None
        self._is_closed = threading.Event()
        self.is_restarting = False
        """Whether an engine has died and the next one is not ready yet."""
        self.num_restarts = 0

    @property
    def ready(self) -> EngineReady:
        """Of the first engine: those after it have the same number of blocks."""
        if self._first_ready is None:
            self._first_ready = self._client.ready
        return self._first_ready

    @property
    def client(self) -> EngineClient:
        """Of the engine that lives now."""
        return self._client

    @property
    def silence(self) -> float:
        return 0.0 if self.is_restarting else self._client.silence

    def send(self, *messages: ClientMessage) -> None:
        with self._lock:
            self._raise_if_over()
            allowed = [message for message in messages if self._note_message(message)]
            if self._is_up and allowed:
                self._deliver(*allowed)

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                self._raise_if_over()
                unreported, self._unreported = self._unreported, []
            if unreported:
                return EngineOutputs(rejections=unreported)
            try:
                if not self._is_up:
                    _ = self.ready
                    self._begin()
                outputs = self._receive(deadline)
            except EngineDeadError as death:
                if self._first_ready is None:
                    raise
                self._restart(death)
                continue
            return None if outputs is None else self._take(outputs)

    def shutdown(self, timeout: float = 5.0) -> None:
        self._is_closed.set()
        with self._lock:
            if self._death is None:
                self._death = EngineDeadError("the engine was shut down")
            client = self._client
        client.shutdown(timeout)

    def _note_message(self, message: ClientMessage) -> bool:
        """Keep of a message what the next engine needs. Returns whether the engine that lives now may have it."""
        match message:
            case AddRequest(request):
                live = self._live[request.request_id] = _LiveRequest.of(request)
                live.is_sent = self._is_up and self._search.allows(request.request_id)
                return live.is_sent
            case Abort(request_id, index):
                self._note_abort(request_id, index)
            case Call(call_id, method, argument):
                self._calls[call_id] = message
                if method == "unregister_prefix":
                    self._prefixes.pop(argument, None)
        return True

    def _receive(self, deadline: float | None) -> EngineOutputs | None:
        """What the engine sends next; None at the deadline (of time.monotonic). Ends an engine that hangs, and raises
        EngineDeadError for it as for one that has died."""
        while True:
            remaining = WATCH_SECONDS if deadline is None else min(WATCH_SECONDS, deadline - time.monotonic())
            outputs = self._client.receive(max(0.0, remaining))
            if outputs is not None:
                return outputs
            silence = self._client.silence
            if 0 < self._hung_engine_timeout <= silence:
                self._client.shutdown(0.0)
                self._raise_if_over()
                raise EngineDeadError(f"the engine process hung: it gave no sign of life for {silence:.0f} s")
            if deadline is not None and time.monotonic() >= deadline:
                return None

    # What the engine reports.

    def _take(self, outputs: EngineOutputs) -> EngineOutputs:
        with self._lock:
            if outputs.updates:
                self._note_updates(outputs.updates)
            for rejected in outputs.rejections:
                if self._live.pop(rejected.request_id, None) is not None:
                    self._note_end(rejected.request_id)
                elif self._prefixes.pop(rejected.request_id, None) is not None:
                    logger.warning("a prefix could not be registered again: %s", rejected.message)
            if outputs.results:
                outputs.results = [self._note_result(r) for r in outputs.results if r.call_id != OWN_CALL]
            if outputs.stats is not None:
                self._stats = outputs.stats
                outputs.stats = carry_over(self._stats_before, outputs.stats)
        return outputs

    def _note_updates(self, updates: list[SequenceUpdate]) -> None:
        self._num_fruitless = 0
        for update in updates:
            live = self._live.get(update.request_id)
            if live is None:
                continue  # aborted meanwhile, or a prefix that is registered again
            live.note(update)
            if live.is_over:
                del self._live[update.request_id]
                if live.request.register_prefix and update.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    self._prefixes[update.request_id] = live.request
                self._note_end(update.request_id)
            elif self._search.note_progress(update.request_id, live.position):
                self._send_waiting()

    def _note_end(self, request_id: str) -> None:
        if self._search.note_end(request_id):
            self._send_waiting()

    def _note_abort(self, request_id: str, index: int | None) -> None:
        live = self._live.get(request_id)
        if live is None or (index is not None and live.request.params.use_beam_search):
            return
        live.ended |= set(range(len(live.generated))) if index is None else {index}
        if live.is_over:
            del self._live[request_id]
            self._note_end(request_id)

    def _note_result(self, result: CallResult) -> CallResult:
        call = self._calls.pop(result.call_id, None)
        if call is not None and result.error is None and call.method in STATES:
            if call.method == "wake_up" and result.value:
                self._states["wake_up"] = call.argument  # behind the call that sent it to sleep
            else:
                self._end_state(call)
        if isinstance(result.value, EngineStats):
            result.value = carry_over(self._stats_before, result.value)
        return result

    def _end_state(self, call: Call) -> None:
        self._states.pop(STATES[call.method], None)
        if STATES[call.method] == "sleep":
            self._states.pop("wake_up", None)
        if call.method in STATES.values():
            self._states[call.method] = call.argument

    # From one engine to the next.

    def _restart(self, death: EngineDeadError) -> None:
        """Note what the death says of the requests, and start another engine. Raises EngineDeadError when this is
        given up, or the client was shut down."""
        with self._lock:
            self._raise_if_over()
            self._is_up, self.is_restarting = False, True
            running = {name: live.position for name, live in self._live.items() if live.is_sent}
            culprit = self._search.note_death(running)
            if culprit is not None:
                del self._live[culprit]
                message = f"the engine died whenever it ran this request, the last time without another one: {death}"
                self._unreported.append(RequestRejected(culprit, message, is_culprit=True))
            for live in self._live.values():
                live.is_sent = False
            if self._stats is not None:
                self._stats_before, self._stats = carry_over(self._stats_before, self._stats), None
            self._num_fruitless += 1
            if self._num_fruitless > MAX_FRUITLESS_DEATHS:
                self._give_up(death, f"the engine died {self._num_fruitless} times in a row without a token")
        what = "; requests go on in groups, to find which one ends it" if self._search.is_searching else ""
        logger.warning(
            "error %s: the engine died with %d requests, and is started again%s: %s",
            death.error_id,
            len(running),
            what,
            death,
        )
        started = time.monotonic()
        self._client.shutdown()
        self._start_another(death)
        self.num_restarts += 1
        self._begin()
        logger.warning("the engine is back after %.1f s; %d requests go on", time.monotonic() - started, len(running))

    def _start_another(self, death: EngineDeadError) -> None:
        """Start an engine and wait until it is ready."""
        for attempt in range(MAX_STARTS):
            if attempt and self._is_closed.wait(PAUSE_SECONDS * 2 ** (attempt - 1)):
                break
            try:
                client = self._start(self._first_ready, self._stats_before)
                with self._lock:
                    self._client = client
                if self._is_closed.is_set():
                    client.shutdown()
                    break
                _ = client.ready
                return
            except QuireError as error:
                self._client.shutdown()
                logger.warning("the engine could not be started again: %s", error)
                reason = f"{error}"
        with self._lock:
            self._raise_if_over()
            self._give_up(death, f"the engine could not be started again: {reason}")

    def _begin(self) -> None:
        """The engine is ready: give it what lives."""
        with self._lock:
            self._raise_if_over()
            self._is_up, self.is_restarting = True, False
            for request in self._prefixes.values():
                self._deliver(AddRequest(request))
            for method, argument in self._states.items():
                self._deliver(Call(OWN_CALL, method, argument))
            self._send_waiting()
            for call in self._calls.values():
                self._deliver(call)

    def _send_waiting(self) -> None:
        """Send what the engine has not got and may have."""
        if self._is_up:
            for request_id, live in self._live.items():
                if not live.is_sent and self._search.allows(request_id):
                    live.is_sent = True
                    self._deliver(AddRequest(live.resumed()))

    def _deliver(self, *messages: ClientMessage) -> None:
        with contextlib.suppress(EngineDeadError):  # the thread in `receive` notices; the next engine gets what lives
            self._client.send(*messages)

    def _give_up(self, death: EngineDeadError, reason: str) -> None:
        self._death = EngineDeadError(f"{reason}: {death}", summary=reason, error_id=death.error_id)
        raise self._death.again()

    def _raise_if_over(self) -> None:
        if self._death is not None:
            raise self._death.again()
