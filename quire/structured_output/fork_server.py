"""Fork server: a process with the model's vocabulary and no threads. Its forks rehearse texts (rehearsal.py) or make
masks (mask_process.py) over the shared vocabulary."""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from quire.envs import prepare_for_forks
from quire.errors import UserError
from quire.structured_output.forks import fork, limit
from quire.structured_output.mask_process import STACK, serve_masks
from quire.structured_output.messages import (
    Cancel,
    ForkServerSetup,
    FrameConnection,
    Outcome,
    Rehearse,
    StartMasks,
    Try,
    Verdict,
)
from quire.structured_output.rehearsal import ENDS_BY_LIMITS, rehearse, too_late, why_it_ended
from quire.structured_output.turns import RehearsalText, RehearsalTurns
from quire.structured_output.vocabulary import check_tokenizer, make_vocabulary
from quire.tokenization.tokenizer import Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

STDIN = 0
NICE = 5
"""Niceness increment of forks for later tries."""
NUM_SPARE = 2
"""Forks that wait for a text."""


class Rehearsal:
    """Fork of the server that rehearses, or waits for a text."""

    def __init__(self, pid: int, connection: FrameConnection) -> None:
        self.pid = pid
        self.connection = connection
        self.job: RehearsalText | None = None

    def end(self) -> int:
        """Kill the fork, if it lives; returns its `returncode`."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.connection.close()
        return os.waitstatus_to_exitcode(status)

    def status(self) -> int:
        """`returncode` of a fork that has closed its connection."""
        _, status = os.waitpid(self.pid, 0)
        self.connection.close()
        return os.waitstatus_to_exitcode(status)


class ForkServer:
    def __init__(self, setup: ForkServerSetup, vocabulary: LLTokenizer | None, failure: str) -> None:
        """failure: reason why the model's tokenizer has no vocabulary, which refuses every text."""
        self._setup = setup
        self._limits = setup.limits
        self._vocabulary = vocabulary
        self._failure = failure
        self._connection = FrameConnection(socket.socket(fileno=setup.fd), takes_descriptors=True)
        self._turns = RehearsalTurns(len(setup.limits.cpu_seconds))
        self._jobs: dict[int, RehearsalText] = {}
        self._spare: list[Rehearsal] = []
        lanes = range(len(setup.limits.cpu_seconds))
        self._running: dict[range, Rehearsal] = {}
        """Lanes -> the fork that makes a try for them."""
        self._ranges = [each for each in (lanes[:1], lanes[1:2], lanes[2:]) if each]
        self._masks_pid = 0
        self._decoder = msgspec.msgpack.Decoder(Rehearse | Cancel | StartMasks)
        self._first_deadline = time.monotonic() + setup.limits.seconds
        """Earliest deadline, for texts that came before the vocabulary was made."""

    def serve(self) -> None:
        """Serve until the engine core is gone."""
        while not self._connection.is_at_end:
            self._dispatch()
            readable = self._wait()
            if STDIN in readable:
                return
            if self._connection.fileno() in readable:
                for frame in self._connection.receive():
                    self._handle(self._decoder.decode(frame))
            for rehearsal in list(self._running.values()):
                if rehearsal.connection.fileno() in readable:
                    self._finish(rehearsal)
            self._end_late_ones()

    def _wait(self) -> set[int]:
        poll = select.poll()
        poll.register(STDIN, select.POLLIN)
        for connection in (self._connection, *(each.connection for each in self._running.values())):
            connection.pump()
            poll.register(connection.fileno(), select.POLLIN | (select.POLLOUT if connection.has_unsent else 0))
        timeout = None
        if self._jobs:
            first = min(job.deadline for job in self._jobs.values())
            timeout = max(0.0, first - time.monotonic()) * 1000 + 1
        return {number for number, events in poll.poll(timeout) if events & ~select.POLLOUT}

    def _handle(self, message: Rehearse | Cancel | StartMasks) -> None:
        match message:
            case Rehearse(number, text, client, deadline):
                if self._failure:
                    self._send(Verdict(number, Outcome(self._failure)))
                    return
                job = self._jobs[number] = RehearsalText(number, text, client, max(deadline, self._first_deadline))
                self._turns.add(job)
            case Cancel(number):
                if (found := self._jobs.pop(number, None)) is not None:
                    self._drop(found)
            case StartMasks():
                self._start_masks(self._connection.descriptors.popleft(), self._connection.descriptors.popleft())

    def _dispatch(self) -> None:
        if self._vocabulary is None:
            return
        for lanes in self._ranges:
            if lanes not in self._running and (job := self._turns.take(lanes)) is not None:
                self._running[lanes] = self._begin(job)
        while len(self._spare) < NUM_SPARE:
            self._spare.append(self._fork_rehearsal())

    def _begin(self, job: RehearsalText) -> Rehearsal:
        rehearsal = self._take_spare() or self._fork_rehearsal()
        rehearsal.job = job
        seconds = job.deadline - time.monotonic()
        work = Try(job.text, self._limits.cpu_seconds[job.lane], seconds, NICE if job.lane else 0)
        rehearsal.connection.send(work)
        return rehearsal

    def _take_spare(self) -> Rehearsal | None:
        while self._spare:
            rehearsal = self._spare.pop()
            if os.waitpid(rehearsal.pid, os.WNOHANG) == (0, 0):
                return rehearsal
            rehearsal.connection.close()
        return None

    def _fork_rehearsal(self) -> Rehearsal:
        vocabulary, limits = self._vocabulary, self._limits
        assert vocabulary is not None
        ours, theirs = socket.socketpair()
        with theirs:
            pid = fork("quire: rehearse", lambda: rehearse(theirs, vocabulary, limits), limits.stack)
        return Rehearsal(pid, FrameConnection(ours))

    def _finish(self, rehearsal: Rehearsal) -> None:
        job = rehearsal.job
        assert job is not None
        frames = rehearsal.connection.receive()
        if frames:
            self._free(rehearsal)
            rehearsal.end()
            self._tell(job, msgspec.msgpack.decode(frames[0], type=Outcome))
        elif rehearsal.connection.is_at_end:
            self._free(rehearsal)
            status = rehearsal.status()
            is_out_of_time = status in (-signal.SIGPROF, -signal.SIGXCPU)
            if is_out_of_time and job.lane + 1 < len(self._limits.cpu_seconds):
                job.lane += 1
                self._turns.add(job)
            elif status not in ENDS_BY_LIMITS and not job.was_killed:
                job.was_killed = True
                self._turns.add(job)
            else:
                self._tell(job, Outcome(why_it_ended(status, self._limits)), is_final=status != -signal.SIGALRM)

    def _free(self, rehearsal: Rehearsal) -> None:
        self._running = {lanes: each for lanes, each in self._running.items() if each is not rehearsal}

    def _drop(self, job: RehearsalText) -> None:
        self._turns.remove(job)
        for rehearsal in list(self._running.values()):
            if rehearsal.job is job:
                self._free(rehearsal)
                rehearsal.end()

    def _end_late_ones(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._jobs.values() if job.deadline <= now]:
            self._drop(job)
            self._tell(job, Outcome(too_late(self._limits)), is_final=False)

    def _tell(self, job: RehearsalText, outcome: Outcome, *, is_final: bool = True) -> None:
        if self._jobs.pop(job.number, None) is not None:
            self._send(Verdict(job.number, outcome, is_final))

    def _send(self, verdict: Verdict) -> None:
        self._connection.send(verdict)

    def _start_masks(self, connection: int, memory: int) -> None:
        if self._masks_pid:
            os.kill(self._masks_pid, signal.SIGKILL)
            os.waitpid(self._masks_pid, 0)
            self._masks_pid = 0
        vocabulary, setup = self._vocabulary, self._setup
        end = socket.socket(fileno=connection)
        if vocabulary is not None:

            def work() -> None:
                serve_masks(end, memory, vocabulary, setup.vocab_size, setup.eos_token_ids, setup.limits)

            self._masks_pid = fork("quire: masks", work, STACK * setup.limits.stack)
        end.close()
        os.close(memory)


def main() -> None:
    serve(open_tokenizer)


def serve(load: Callable[..., Tokenizer | None]) -> None:
    """Read the setup from standard input, make the vocabulary and fork until the parent is gone. load: makes the
    tokenizer from the engine's options and the model's vocabulary size."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return  # the parent ended before it had said what to do
    setup = msgspec.json.decode(line, type=ForkServerSetup)
    # The parent decides on signals to all processes of a service, and ends this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    prepare_for_forks(STACK * setup.limits.stack)
    limit(resource.RLIMIT_CORE, 0)
    vocabulary, failure = None, ""
    try:
        tokenizer = check_tokenizer(load(setup.options, setup.vocab_size))
        ends = [each for each in tokenizer.ends(setup.eos_token_ids) if 0 <= each < setup.vocab_size]
        setup = msgspec.structs.replace(setup, eos_token_ids=ends)
        vocabulary = make_vocabulary(tokenizer, setup.vocab_size, ends)
    except UserError as error:
        failure = error.message
    gc.collect()
    gc.freeze()
    ForkServer(setup, vocabulary, failure).serve()
    os._exit(0)
