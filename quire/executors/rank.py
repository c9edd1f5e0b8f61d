"""Process of one rank, started by RankProcesses: runs an executor and answers the engine core's calls with messages."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from quire.config.engine import EngineConfig
from quire.errors import QuireError, UserError
from quire.executors.interface import Executor, StepFuture
from quire.executors.wire import decode, encode
from quire.logging import configure_logging, get_logger
from quire.parallel.link_files import LinkFiles
from quire.parallel.mesh import Mesh, Place
from quire.step import SamplingInputs, StepPlan, StepResult
from quire.utils.child_process import watch_parent
from quire.utils.failures import explain
from quire.utils.heartbeat import Progress, start_beating

if TYPE_CHECKING:
    from quire.config.parallel import ParallelConfig
    from quire.parallel.stage import Link
    from quire.parallel.torch_dist import NetworkMeeting

logger = get_logger(__name__)

JOIN = "join"
"""First call: its answer says that all ranks have met."""
EXECUTE = "execute"
LAUNCH, SAMPLE = "launch", "sample"
"""Message like EXECUTE for a plan that expects sampling inputs: forward pass now, samples when they come."""
STEPS = (EXECUTE, LAUNCH, SAMPLE)


class RankLaunch(msgspec.Struct):
    """Start message of the process: one line of JSON. socket_fd: socket for messages in both directions. meeting_point:
    beginning of the paths of files with the ranks' addresses, one per stage. beats_fd: write end of a pipe for beats
    (quire/utils/heartbeat.py). incoming, outgoing: links to neighbouring stages."""

    rank: int
    socket_fd: int
    meeting_point: str
    beats_fd: int
    incoming: LinkFiles | None = None
    outgoing: LinkFiles | None = None

    def ends(self, stage: int) -> RankEnds:
        """Connections of this rank to the others. stage: rank's stage."""
        return RankEnds(Path(f"{self.meeting_point}{stage}"), self.incoming, self.outgoing)


class RankEnds(NamedTuple):
    """Rank's connections to other ranks. meeting_point: `join_group`'s, for its stage's ranks. collectives: name of
    GROUPS (None: the configuration's). incoming, outgoing: see RankLaunch. network: place where ranks of
    neighbouring stages meet, if they have no such links."""

    meeting_point: Path | NetworkMeeting
    incoming: LinkFiles | None = None
    outgoing: LinkFiles | None = None
    collectives: str | None = None
    network: NetworkMeeting | None = None

    def meeting_of(self, name: str) -> Path | NetworkMeeting:
        """Meeting point, by name, at which some of the stage's ranks form a group."""
        whole = self.meeting_point
        return whole.with_name(f"{whole.name} {name}") if isinstance(whole, Path) else whole.of(name)


class RankCall(msgspec.Struct, array_like=True):
    """Call of a rank's executor. body: StepPlan to `execute` or `launch`, SamplingInputs to `sample`; for any other
    method its arguments, in the format of quire/executors/wire.py."""

    method: str
    body: msgspec.Raw


class RankError(msgspec.Struct, array_like=True):
    """Error of a call. error_type: class in quire.errors; None: another one, which `message` names."""

    message: str
    error_type: str | None
    param: str | None


class RankAnswer(msgspec.Struct, array_like=True):
    """Message from a rank to the engine: result of its oldest call. body: StepResult, or the method's result."""

    body: msgspec.Raw
    error: RankError | None = None


NOTHING = msgspec.Raw(encode(None))
Outcome: TypeAlias = StepFuture | msgspec.Raw | BaseException
"""Plan's result, which may be to come; another call's result; or an exception."""


def main() -> None:
    """Run the rank until its socket or its parent's pipe closes."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent decides what Ctrl-C and the end of a terminal mean
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return  # the parent ended before it sent the RankLaunch
    launch = msgspec.json.decode(line, type=RankLaunch)
    watch_parent(_nothing)
    configure_logging()
    progress = Progress()
    start_beating(launch.beats_fd, progress.byte)
    socket = Connection(launch.socket_fd)
    with suppress(EOFError, OSError):  # the parent has closed the socket: it is done, or gone
        serve(Rank(launch.rank, launch.ends), socket, progress)
    # Interpreter shutdown would tear down thread pools and freed gigabytes one by one; nothing is left to save.
    with suppress(OSError):  # output that cannot be written is lost
        sys.stdout.flush()
    os._exit(0)


class Rank:
    """Executor of one rank in its process or actor, made by the first call."""

    def __init__(self, number: int, ends: Callable[[int], RankEnds]) -> None:
        """Rank number `number`. ends: number of the rank's stage -> its ends."""
        self._number = number
        self._ends = ends
        self._executor: Executor | None = None
        self._plans = msgspec.msgpack.Decoder(StepPlan)
        self._sampling_inputs = msgspec.msgpack.Decoder(SamplingInputs)
        self._results = msgspec.msgpack.Encoder()
        self._launched: StepFuture = Future()
        self._answers_in_full = False
        """True for the first of the ranks that sample."""

    def begin(self, call: RankCall) -> Outcome:
        """Start one call. A plan may still run when this returns."""
        try:
            return self._begin(call)
        except BaseException as error:  # every error must reach the parent
            return error

    def answer(self, outcome: Outcome) -> RankAnswer:
        """Wait for the result of `begin`; always on one thread, maybe another than `begin`'s."""
        if not isinstance(outcome, msgspec.Raw | BaseException):
            try:
                result = outcome.result()
            except BaseException as error:  # every error must reach the parent
                outcome = error
            else:
                return RankAnswer(msgspec.Raw(self._results.encode(self._own_part(result))))
        if isinstance(outcome, msgspec.Raw):
            return RankAnswer(outcome)
        logger.debug("rank %d failed", self._number, exc_info=outcome)
        if isinstance(outcome, QuireError):
            param = outcome.param if isinstance(outcome, UserError) else None
            return RankAnswer(NOTHING, RankError(str(outcome), type(outcome).__name__, param))
        return RankAnswer(NOTHING, RankError(explain(outcome), None, None))

    def _begin(self, call: RankCall) -> Outcome:
        if call.method == JOIN:
            (config,) = decode(call.body)
            self._executor = self._join(config)
            return NOTHING
        assert self._executor is not None, "the first call is to join"
        if call.method not in STEPS:
            return msgspec.Raw(encode(getattr(self._executor, call.method)(*decode(call.body))))
        if call.method == SAMPLE:
            self._executor.send_sampling_inputs(self._sampling_inputs.decode(call.body))
        else:
            self._launched = self._executor.execute(self._plans.decode(call.body))
        if call.method == LAUNCH and not self._launched.done():  # a launched plan that is done has failed
            return NOTHING
        return self._launched

    def _own_part(self, result: StepResult) -> StepResult:
        """Part of a result that the first sampling rank does not send, with a checksum of its samples."""
        checksum = zlib.crc32(self._results.encode((result.token_ids, result.pooled)))
        if self._answers_in_full:
            result.checksum = checksum
            return result
        return StepResult(
            result.step_id,
            [],
            transfers=result.transfers,
            nonfinite=result.nonfinite,
            encoder_seconds=result.encoder_seconds,
            checksum=checksum,
        )

    def _join(self, config: EngineConfig) -> Executor:
        from quire.executors.local import LocalExecutor
        from quire.parallel.choice import join_group
        from quire.parallel.interface import ProcessGroup
        from quire.parallel.stage import WHOLE_MODEL, Stage
        from quire.worker.platform.choice import make_platform

        sizes = config.parallel
        place = Mesh(sizes).place(self._number)
        ends = self._ends(place.pp)
        self._answers_in_full = (place.pp, place.pcp, place.tp) == (sizes.pp - 1, 0, 0)
        stage = WHOLE_MODEL
        group: ProcessGroup | None = None
        sharing: ProcessGroup | None = None
        collectives = ends.collectives or config.device.collectives
        if sizes.tp > 1:
            meeting = ends.meeting_of(f"layers {place.pcp}") if sizes.pcp > 1 else ends.meeting_point
            group = join_group(collectives, meeting, place.tp, sizes.tp)
        if sizes.pcp > 1:
            sharing = join_group(collectives, ends.meeting_of(f"prompts {place.tp}"), place.pcp, sizes.pcp)
        if sizes.pp > 1:
            layers = config.model.shape.stages(sizes.pp)[place.pp]
            stage = Stage(place.pp, sizes.pp, layers, *_links(ends, place, sizes))
        return LocalExecutor(config, make_platform(config, group, stage, sharing))


def _links(ends: RankEnds, place: Place, sizes: ParallelConfig) -> tuple[Link | None, Link | None]:
    from quire.parallel.stage import SharedMemoryLink, network_links

    if ends.network is not None:
        return network_links(ends.network.of, place, sizes.pp)
    files = ends.incoming, ends.outgoing
    incoming, outgoing = (None if each is None else SharedMemoryLink(each) for each in files)
    return incoming, outgoing


class Answers:
    """Sends the outcomes of calls in order. A thread waits for running plans while the rank reads the next call."""

    def __init__(self, rank: Rank, socket: Connection, progress: Progress) -> None:
        self._rank = rank
        self._socket = socket
        self._progress = progress
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()
        self._num_awaited = 0
        self._awaited: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="quire-answers", daemon=True).start()

    def begin(self) -> None:
        """Note that a call has come, before it runs."""
        with self._lock:
            self._num_awaited += 1
            self._progress.is_idle = False
        self._progress.turn()

    def add_outcome(self, outcome: Outcome) -> None:
        """Add a running or finished call; a finished one is answered at once, unless an earlier one is not. Raises
        OSError if the parent has closed its end."""
        with self._lock:
            waits = self._num_awaited > 1
        if waits or not (isinstance(outcome, msgspec.Raw | BaseException) or outcome.done()):
            self._awaited.put(outcome)
        else:
            self._send(outcome)

    def _run(self) -> None:
        with suppress(OSError):  # if the parent has closed its end, the reading thread notices
            while True:
                self._send(self._awaited.get())

    def _send(self, outcome: Outcome) -> None:
        self._socket.send_bytes(self._encode(self._rank.answer(outcome)))
        self._progress.turn()
        with self._lock:
            self._num_awaited -= 1
            self._progress.is_idle = self._num_awaited == 0


def serve(rank: Rank, socket: Connection, progress: Progress) -> None:
    """Begin calls in order. Raises EOFError or OSError if the parent has closed its end."""
    calls = msgspec.msgpack.Decoder(RankCall)
    answers = Answers(rank, socket, progress)
    progress.is_idle = True
    while True:
        message = socket.recv_bytes()
        answers.begin()
        answers.add_outcome(rank.begin(calls.decode(message)))


def _nothing() -> None:
    """Do nothing when the parent ends (`watch_parent`): a rank leaves no files."""
