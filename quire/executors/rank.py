"""The process of one rank: runs an executor of its own, and answers each call of the engine core with a message.

Started by RankProcesses, which writes a RankLaunch to standard input and keeps that pipe open: its end-of-file means
that the parent is gone.
"""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from quire.config.engine import EngineConfig
from quire.errors import QuireError, UserError
from quire.executors.interface import Executor, StepFuture
from quire.executors.wire import decode, encode
from quire.logging import configure_logging, get_logger
from quire.step import SamplingInputs, StepPlan, StepResult
from quire.utils.child_process import watch_parent
from quire.utils.failures import explain
from quire.utils.heartbeat import Progress, start_beating

logger = get_logger(__name__)

JOIN = "join"
"""The first call: its answer says that all ranks have met."""
EXECUTE = "execute"
LAUNCH, SAMPLE = "launch", "sample"
"""Instead of EXECUTE, for a plan that expects sampling inputs: the forward pass; the rest, when they are there."""
STEPS = (EXECUTE, LAUNCH, SAMPLE)


class RankLaunch(msgspec.Struct):
    """What the process is told: one line of JSON. socket_fd: of messages in both directions. meeting_point: a file for
    the ranks' addresses. beats_fd: write end of a pipe for beats (quire/utils/heartbeat.py)."""

    rank: int
    size: int
    socket_fd: int
    meeting_point: str
    beats_fd: int


class RankCall(msgspec.Struct, array_like=True):
    """body: a StepPlan to `execute` or `launch`, SamplingInputs to `sample`; of any other method the arguments, in the
    format of quire/executors/wire.py."""

    method: str
    body: msgspec.Raw


class RankError(msgspec.Struct, array_like=True):
    """error_type: the class in quire.errors; None: another one, which `message` names."""

    message: str
    error_type: str | None
    param: str | None


class RankAnswer(msgspec.Struct, array_like=True):
    """body: a StepResult, or what the method returned."""

    body: msgspec.Raw
    error: RankError | None = None


NOTHING = msgspec.Raw(encode(None))


def main() -> None:
    """Run the rank until its socket or its parent's pipe closes."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent decides what Ctrl-C and the end of a terminal mean
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return  # the parent ended before it had said what to do
    launch = msgspec.json.decode(line, type=RankLaunch)
    watch_parent(_nothing)
    configure_logging()
    progress = Progress()
    start_beating(launch.beats_fd, progress.byte)
    socket = Connection(launch.socket_fd)
    with suppress(EOFError, OSError):  # the parent has closed the socket: it is done, or gone
        serve(Rank(launch), socket, progress)
    # Interpreter shutdown would tear down thread pools and freed gigabytes one by one; nothing is left to save.
    with suppress(OSError):  # what cannot be written is lost
        sys.stdout.flush()
    os._exit(0)


class Rank:
    """One rank's executor, made by the first call."""

    def __init__(self, launch: RankLaunch) -> None:
        self._launch = launch
        self._executor: Executor | None = None
        self._plans = msgspec.msgpack.Decoder(StepPlan)
        self._sampling_inputs = msgspec.msgpack.Decoder(SamplingInputs)
        self._launched: StepFuture = Future()

    def answer(self, call: RankCall) -> RankAnswer:
        """Run one call."""
        try:
            return RankAnswer(self._run(call))
        except BaseException as error:  # the parent must learn of it, whatever it is
            logger.debug("rank %d failed in %s", self._launch.rank, call.method, exc_info=True)
            if isinstance(error, QuireError):
                param = error.param if isinstance(error, UserError) else None
                return RankAnswer(NOTHING, RankError(str(error), type(error).__name__, param))
            return RankAnswer(NOTHING, RankError(explain(error), None, None))

    def _run(self, call: RankCall) -> msgspec.Raw:
        if call.method == JOIN:
            (config,) = decode(call.body)
            self._executor = self._join(config)
            return NOTHING
        assert self._executor is not None, "the first call is to join"
        if call.method in STEPS:
            if call.method == SAMPLE:
                self._executor.send_sampling_inputs(self._sampling_inputs.decode(call.body))
            else:
                self._launched = self._executor.execute(self._plans.decode(call.body))
            if call.method == LAUNCH and not self._launched.done():  # done: it has failed
                return NOTHING
            result = self._launched.result()
            if self._launch.rank:
                result = StepResult(result.step_id, result.token_ids, pooled=result.pooled)
            return msgspec.Raw(msgspec.msgpack.encode(result))
        return msgspec.Raw(encode(getattr(self._executor, call.method)(*decode(call.body))))

    def _join(self, config: EngineConfig) -> Executor:
        from quire.executors.local import LocalExecutor
        from quire.parallel.torch_dist import GlooGroup
        from quire.worker.platform.cpu import CpuPlatform

        group = GlooGroup(Path(self._launch.meeting_point), self._launch.rank, self._launch.size)
        # In order and at once, whatever the queue depth: the socket is the queue.
        config = replace(config, scheduler=replace(config.scheduler, queue_depth=1))
        return LocalExecutor(config, CpuPlatform(config, group))


def serve(rank: Rank, socket: Connection, progress: Progress) -> None:
    """Answer calls in order. Raises EOFError or OSError when the parent has closed its end."""
    calls = msgspec.msgpack.Decoder(RankCall)
    encoder = msgspec.msgpack.Encoder()
    while True:
        progress.is_idle = True
        message = socket.recv_bytes()
        progress.is_idle = False
        progress.turn()
        call = calls.decode(message)
        socket.send_bytes(encoder.encode(rank.answer(call)))


def _nothing() -> None:
    """A rank leaves nothing behind."""
