"""Ranks as processes of this host, each with a socket to the engine core: calls go out in order, answers come back.

A rank that ends, for whatever reason, ends the others: none can compute without it.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from quire import envs
from quire.config.engine import EngineConfig
from quire.errors import EngineDeadError, QuireError, named_error
from quire.executors.interface import Executor, VitalSigns
from quire.executors.rank import EXECUTE, JOIN, LAUNCH, SAMPLE, STEPS, RankAnswer, RankCall, RankLaunch
from quire.executors.ranked import RankedExecutor
from quire.executors.wire import decode, encode
from quire.parallel.link_files import LinkFiles
from quire.parallel.mesh import Mesh
from quire.step import SamplingInputs, StepPlan, StepResult
from quire.utils.child_process import describe_exit, kill, start_interpreter, wait_or_kill
from quire.utils.heartbeat import Heartbeat, decode_beats
from quire.utils.runtime_directory import RuntimeDirectory

GRACE_SECONDS = 2.0
"""After a rank's error, the time for the other ranks to answer, or to be found ended. Then they count as waiting for
the rank that has failed, and are ended."""
EXIT_SECONDS = 5.0
MEETING_POINT = "ranks"
LINK_ELEMENT_BYTES = 4
"""Most bytes of an element that passes from stage to stage."""


def make_multiprocess_executor(config: EngineConfig) -> Executor:
    """Start one process for each rank of the configuration. Raises ConfigError, and what a rank fails with."""
    return RankedExecutor(RankProcesses(config), config.parallel.pp)


class Links:
    """The links between ranks of neighbouring stages, while the ranks are started: they inherit the descriptors."""

    def __init__(self, mesh: Mesh, config: EngineConfig) -> None:
        slot_bytes = LINK_ELEMENT_BYTES * config.scheduler.max_num_batched_tokens * config.model.hidden_size
        self._mesh = mesh
        stages = [group for group in mesh.groups("pp") if len(group) > 1]
        self._behind = {rank: LinkFiles.create(slot_bytes) for group in stages for rank in group[:-1]}

    def of_rank(self, rank: int) -> tuple[LinkFiles | None, LinkFiles | None]:
        """The link from the stage before and the one to the stage behind."""
        group = self._mesh.group_of(rank, "pp")
        place = group.index(rank)
        return (self._behind[group[place - 1]] if place else None), self._behind.get(rank)

    def close(self) -> None:
        """Idempotent."""
        while self._behind:
            self._behind.popitem()[1].close()


class PendingCall:
    """A call that went to every rank. decode: of an answer's body. answers: in rank order, None: not yet."""

    def __init__(self, method: str, decode: Callable[[msgspec.Raw], Any], num_ranks: int) -> None:
        self.method = method
        self.answers: list[RankAnswer | None] = [None] * num_ranks
        self.future: Future[list[Any]] = Future()
        self.future.set_running_or_notify_cancel()
        self._decode = decode

    @property
    def is_answered(self) -> bool:
        """Whether every rank has answered."""
        return None not in self.answers

    def error(self) -> QuireError | None:
        """What the first rank that failed says, with its number unless all ranks say it."""
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
        """Complete the future: with the end of a rank, which explains the errors of others, else an error among the
        answers, else the answers."""
        if self.future.done():
            return
        error = death or self.error()
        if error is not None:
            self.future.set_exception(error)
            return
        try:
            results = [self._decode(answer.body) for answer in self.answers if answer is not None]
        except msgspec.DecodeError as mistake:  # whatever it is, the core waits for this future
            self.future.set_exception(mistake)
        else:
            self.future.set_result(results)


class RankPulse:
    """What one rank says of itself. fd: read end of the pipe of its beats."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._heartbeat = Heartbeat()
        self._has_begun = False
        self._stalled: float | None = None

    def feel(self) -> VitalSigns:
        """Read what has come since the last time."""
        try:
            beats = os.read(self._fd, 65536)
        except BlockingIOError:
            beats = b""
        if beats:
            self._has_begun = True
            self._stalled = decode_beats(beats)
            self._heartbeat.beat()
        elif self._has_begun:  # before that its interpreter starts
            self._heartbeat.look()
        stalled = math.inf if self._stalled is None else self._stalled
        return VitalSigns(self._heartbeat.silence if self._has_begun else 0.0, stalled)

    def close(self) -> None:
        os.close(self._fd)


class RankProcesses:
    """Implements `Workers`. One thread reads what the ranks send, and notices when one ends."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the processes; return when they have met. Raises what a rank fails with."""
        mesh = Mesh(config.parallel)
        self._num_ranks = mesh.num_ranks
        self._encoder = msgspec.msgpack.Encoder()
        self._decode_result = msgspec.msgpack.Decoder(StepResult).decode
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        """Of the three below. Never held while a message is sent: a rank that cannot send does not read either."""
        self._pending: deque[PendingCall] = deque()
        self._death: EngineDeadError | None = None
        self._is_closed = False
        self._unsent: PendingCall | None = None
        """Of the last plan, while it lacks its sampling inputs."""
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pulses: list[RankPulse] = []
        self._feeling = threading.Lock()
        """Of the pulses."""
        self._directory = RuntimeDirectory.create(envs.runtime_directory())
        self._abandon = weakref.finalize(self, _abandon, self._processes, self._directory, os.getpid())
        self._reader = threading.Thread(target=self._read, name="quire-ranks", daemon=True)
        links = Links(mesh, config)
        try:
            for rank in range(self._num_ranks):
                self._start(rank, links)
            links.close()
            self._reader.start()
            self.call(JOIN, config)
        except BaseException:
            links.close()
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids, in rank order."""
        return [process.pid for process in self._processes]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self._submit(PendingCall(method, decode, self._num_ranks), encode(arguments)).result()

    def execute(self, plan: StepPlan) -> Future[list[StepResult]]:
        body = self._encoder.encode(plan)
        if not plan.expects_sampling_inputs:
            return self._submit(PendingCall(EXECUTE, self._decode_result, self._num_ranks), body)
        sampled = self._unsent = PendingCall(SAMPLE, self._decode_result, self._num_ranks)

        def note_failure(launched: Future[list[Any]]) -> None:  # on the reader's thread, as all that settles calls
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
        for connection in self._connections:
            _hang_up(connection)  # the rank and our reader see the end of the stream
        for process in self._processes:
            wait_or_kill(process, EXIT_SECONDS)
        if self._reader.is_alive():
            self._reader.join()
        with self._sending:
            for connection in self._connections:
                connection.close()
        with self._feeling:
            while self._pulses:
                self._pulses.pop().close()
        self._abandon()

    def _start(self, rank: int, links: Links) -> None:
        ours, theirs = socket.socketpair()
        pulse_fd, beats_fd = os.pipe()
        self._pulses.append(RankPulse(pulse_fd))
        try:
            meeting_point = str(self._directory.path / MEETING_POINT)
            incoming, outgoing = links.of_rank(rank)
            launch = RankLaunch(rank, theirs.fileno(), meeting_point, beats_fd, incoming, outgoing)
            line = msgspec.json.encode(launch)
            descriptors = [theirs.fileno(), beats_fd, *(incoming or ()), *(outgoing or ())]
            process = start_interpreter("quire.executors.rank", f"quire: rank {rank}", line, descriptors)
        finally:
            theirs.close()
            os.close(beats_fd)
        self._connections.append(Connection(ours.detach()))
        self._processes.append(process)

    def _submit(self, call: PendingCall, body: bytes) -> Future[list[Any]]:
        message = self._encoder.encode(RankCall(call.method, msgspec.Raw(body)))
        with self._sending:
            with self._lock:
                if self._death is not None:
                    raise self._death.again()
                self._pending.append(call)
            for connection in self._connections:
                _send(connection, message)
        return call.future

    def _read(self) -> None:
        """Take the ranks' answers until one of them ends, or fails while others wait for it."""
        ranks = {connection: rank for rank, connection in enumerate(self._connections)}
        answers = msgspec.msgpack.Decoder(RankAnswer)
        deadline: float | None = None
        while deadline is None or time.monotonic() < deadline:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            for ready in wait(list(ranks), remaining):
                assert isinstance(ready, Connection), "nothing else was given"
                rank = ranks[ready]
                try:
                    message = ready.recv_bytes()
                except (EOFError, OSError):
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
        """Note a rank's answer to its oldest call, and complete the call when it was the last. Returns what a step has
        failed with: the ranks' request states are undefined then."""
        with self._lock:
            call = next(call for call in self._pending if call.answers[rank] is None)
            call.answers[rank] = answer
            if not call.is_answered:
                return None
            self._pending.remove(call)
        call.settle()
        return call.error() if call.method in STEPS else None

    def _has_failure(self) -> bool:
        """Whether a rank has failed in a call that others have not answered."""
        with self._lock:
            return any(call.error() is not None for call in self._pending)

    def _die(self, reason: str) -> None:
        """End all ranks, and fail every call."""
        with self._lock:
            if self._death is None:
                self._death = EngineDeadError(reason)
            pending = list(self._pending)
            self._pending.clear()
        for process in self._processes:
            kill(process)
        for call in pending:
            call.settle(self._death.again())

    def _explain_exit(self, rank: int) -> str:
        process = self._processes[rank]
        try:
            status = process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"rank {rank} of {self._num_ranks} (process {process.pid}) closed its connection"
        hint = ", perhaps for lack of memory" if status == -signal.SIGKILL else ""
        return f"rank {rank} of {self._num_ranks} (process {process.pid}) {describe_exit(status)}{hint}"


def _send(connection: Connection, message: bytes) -> None:
    with suppress(OSError):  # where the rank has ended, the reader notices it and tells every call
        connection.send_bytes(message)


def _hang_up(connection: Connection) -> None:
    """End the stream in both directions."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same, suppress(OSError):  # the rank may have ended
        same.shutdown(socket.SHUT_RDWR)


def _abandon(processes: Sequence[subprocess.Popen[bytes]], directory: RuntimeDirectory, owner: int) -> None:
    """Make sure that nothing is left of the ranks. Also runs at the end of the interpreter."""
    if os.getpid() != owner:
        return  # a fork of the owner ends; the ranks are not its own
    for process in processes:
        kill(process)
    directory.remove()
