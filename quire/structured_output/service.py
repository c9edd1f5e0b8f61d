"""Constraint service of one engine: the engine core's side.

A client's text is first rehearsed in a fork (fork_server.py); matchers of good texts live in the mask process
(mask_process.py).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import select
import socket
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from quire.config.options import EngineOptions
from quire.decoding.masks import Matcher
from quire.errors import EngineDeadError, UserError
from quire.logging import get_logger
from quire.structured_output.mask_client import HANG_SECONDS, PREFIX, MaskClient, out_of_order
from quire.structured_output.messages import (
    LIMITS,
    Cancel,
    ForkServerSetup,
    FrameConnection,
    Outcome,
    RehearsalLimits,
    Rehearse,
    StartMasks,
    Verdict,
)
from quire.structured_output.recent_texts import RecentTexts
from quire.structured_output.remote_matcher import ConstraintText, RemoteConstraint, RemoteMatcher, too_much_work
from quire.utils.child_process import describe_exit, kill, start_interpreter

logger = get_logger(__name__)

FORK_SERVER = "quire.structured_output.fork_server"
MAX_OUTCOMES = 1024
MAX_OUTCOME_CHARACTERS = 2**24
MASK_SECONDS = 5.0
"""Longest wait of `await_mask` in seconds."""
SPIN_SECONDS = 0.00005
"""Seconds for which a wait spins."""
START_SECONDS = 60.0
MAX_STARTS = 3
"""Starts of the fork server in a row without a message, after which its waiting work fails."""


class ConstraintService:
    """MaskSource of the engine core, used by its thread."""

    def __init__(
        self,
        options: EngineOptions,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: RehearsalLimits = LIMITS,
        module: str = FORK_SERVER,
    ) -> None:
        """options: name the tokenizer; its own end-of-sequence token ends a text too. limits: time and memory of each
        constraint's trial compilation. module: module with the fork server's `main`."""
        self._limits = limits
        self._module = module
        self._setup = ForkServerSetup(options, vocab_size, list(eos_token_ids), -1, limits)
        self.masks = MaskClient(vocab_size, self._start_masks, self._condemn)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: FrameConnection | None = None
        self._finalizer: weakref.finalize[..., ConstraintService] | None = None
        self._num_starts = 0
        self._last_sign = 0.0
        """time.monotonic() of the fork server's last message, or latest end of loading."""
        self._is_closed = False
        self._decoder = msgspec.msgpack.Decoder(Verdict)
        self._texts: weakref.WeakValueDictionary[str, ConstraintText] = weakref.WeakValueDictionary()
        self._outcomes: RecentTexts[Known] = RecentTexts(lambda text, _: len(text))
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count(1)
        self._charges = itertools.count(1)
        self.forgotten_jobs: deque[int] = deque()
        """Rehearsals of texts that no request names any more."""

    def constraint(self, text: str, client: str = "") -> RemoteConstraint:
        known = self._outcomes.get(text)
        if known is not None and known.outcome.reason:
            raise refusal(known.outcome.reason)
        found = self._texts.get(text)
        if found is None:
            found = self._texts[text] = ConstraintText(self, text, None if known is None else known.behind)
        found.outcome = found.outcome or (None if known is None else known.outcome)
        return RemoteConstraint(self, found, client, next(self._charges))

    def begin(self, matcher: RemoteMatcher) -> None:
        text = matcher.constraint.text
        if text.outcome is None:
            if not text.job:
                self._begin_rehearsal(text, matcher.constraint.client)
            self._jobs[text.job].matchers.append(weakref.ref(matcher))
        elif text.outcome.reason:
            self._refuse(matcher, text.outcome)
        else:
            self.masks.add(matcher)

    def flush(self) -> None:
        while self.forgotten_jobs:
            number = self.forgotten_jobs.popleft()
            if self._jobs.pop(number, None) is not None and self._connection is not None:
                self._connection.send(Cancel(number))
        self.masks.flush()

    def wait(self, matchers: Iterable[Matcher], seconds: float) -> None:
        asked = list(matchers)
        self._wait(lambda: all(matcher.is_ready for matcher in asked), seconds)

    def wait_answer(self, seconds: float) -> None:
        self._wait(lambda: self.masks.num_settled > 0, seconds)

    def _wait(self, is_over: Callable[[], bool], seconds: float) -> None:
        began = time.monotonic()
        while True:
            self._receive()
            self.masks.settle()
            if is_over():
                return
            waited = time.monotonic() - began
            if waited >= seconds:
                return
            if waited < SPIN_SECONDS:
                os.sched_yield()
            else:
                self._poll(min(seconds - waited, 1.0))

    def await_mask(self, matcher: RemoteMatcher) -> None:
        """Wait until a matcher's mask is there, or known not to come. Raises UserError after MASK_SECONDS, starts of
        processes aside."""
        deadline = time.monotonic() + MASK_SECONDS
        self.flush()
        while not matcher.has_mask:
            if self.masks.is_starting:
                deadline = time.monotonic() + MASK_SECONDS
            elif time.monotonic() > deadline:
                raise too_much_work()
            if not self._receive():
                self._poll(1.0)

    def idle(self) -> None:
        if self._process is None and not self._is_closed:
            self._start_server()
        self.masks.trim()
        self._receive()
        self.masks.settle()

    def close(self) -> None:
        self._is_closed = True
        self.masks.close()
        self._end_server()

    # The fork server

    def _send(self, message: Rehearse | StartMasks, descriptors: Sequence[int] = ()) -> bool:
        """Send a message. False: the fork server cannot be started."""
        if self._connection is None:
            self._start_server()
        if self._connection is None:
            for descriptor in descriptors:
                os.close(descriptor)
            return False
        self._connection.send(message, descriptors)
        return True

    def _start_server(self) -> None:
        if self._is_closed:
            raise EngineDeadError("the engine was shut down")
        self._num_starts += 1
        with contextlib.ExitStack() as undo:
            try:
                ours, theirs = socket.socketpair()
                undo.callback(ours.close)
                with theirs:
                    line = msgspec.json.encode(msgspec.structs.replace(self._setup, fd=theirs.fileno()))
                    process = start_interpreter(self._module, "quire: grammars", line, [theirs.fileno()])
            except OSError as error:  # no memory or descriptors for a moment
                logger.warning("the fork server for structured outputs cannot be started: %s", error)
                return
            undo.pop_all()
        self._process, self._connection = process, FrameConnection(ours)
        self._last_sign = time.monotonic() + START_SECONDS
        self._finalizer = weakref.finalize(self, _end, process, os.getpid())

    def _end_server(self) -> str:
        if self._process is None or self._connection is None or self._finalizer is None:
            return "cannot be started"
        self._finalizer()
        self._connection.close()
        how = describe_exit(self._process.returncode or 0)
        self._process = self._connection = None
        return how

    def _receive(self) -> bool:
        """Process the messages that have come. False: the mask process sent none."""
        connection = self._connection
        if connection is None and self._jobs:
            self._start_server_again()
        elif connection is not None and (self._jobs or self.masks.is_starting or connection.is_at_end):
            connection.pump()
            frames = connection.receive()
            for frame in frames:
                self._num_starts, self._last_sign = 0, time.monotonic()
                self._take(self._decoder.decode(frame))
            if not frames and (connection.is_at_end or self._is_late()):
                self._start_server_again()
        is_news = self.masks.receive()
        if not is_news:
            self.masks.check()
        self.flush()
        return is_news

    def _is_late(self) -> bool:
        """True if the fork server owes a verdict."""
        first = min((job.deadline for job in self._jobs.values()), default=math.inf)
        seconds = time.monotonic() - max(first, self._last_sign + self._limits.seconds)
        if seconds > HANG_SECONDS:
            logger.warning("the fork server for structured outputs is %.0f s late, and is ended", seconds)
        return seconds > HANG_SECONDS

    def _poll(self, seconds: float) -> None:
        poll = select.poll()
        for connection in (self._connection, self.masks.connection):
            if connection is not None:
                poll.register(connection.fileno(), select.POLLIN | (select.POLLOUT if connection.has_unsent else 0))
        poll.poll(seconds * 1000)

    def _start_server_again(self) -> None:
        how = self._end_server()
        logger.warning("the fork server for structured outputs %s", how)
        if self._num_starts >= MAX_STARTS:
            jobs, self._jobs = self._jobs, {}
            self._num_starts = 0
            for job in jobs.values():
                self._tell(job, Outcome(f"the process that compiles constraints {how}"), is_final=False)
            self.masks.fail_all(out_of_order())
            self.masks.close()
            return
        self.masks.start_again()
        for number, job in self._jobs.items():
            text = job.text()
            if text is not None and not self._send(Rehearse(number, text.text, job.client, job.deadline)):
                return

    def _start_masks(self, connection: int, memory: int) -> None:
        self._send(StartMasks(), [connection, memory])

    # Rehearsals

    def _begin_rehearsal(self, text: ConstraintText, client: str) -> None:
        text.job = next(self._numbers)
        job = self._jobs[text.job] = Job(weakref.ref(text), client, time.monotonic() + self._limits.seconds)
        self._send(Rehearse(text.job, text.text, client, job.deadline))

    def _take(self, verdict: Verdict) -> None:
        job = self._jobs.pop(verdict.job, None)
        if job is not None:
            self._tell(job, verdict.outcome, is_final=verdict.is_final)

    def _tell(self, job: Job, outcome: Outcome, *, is_final: bool) -> None:
        text = job.text()
        if text is not None:
            text.job = 0
            text.outcome = outcome if is_final else None
            if is_final:
                self._keep(text, outcome)
        for reference in job.matchers:
            matcher = reference()
            if matcher is not None and outcome.reason:
                self._refuse(matcher, outcome)
            elif matcher is not None:
                self.masks.add(matcher)

    def _refuse(self, matcher: RemoteMatcher, outcome: Outcome) -> None:
        self.masks.refuse(matcher, refusal(outcome.reason))

    def _keep(self, text: ConstraintText, outcome: Outcome) -> None:
        self._outcomes.put(text.text, Known(outcome, text.behind), MAX_OUTCOMES, MAX_OUTCOME_CHARACTERS)

    def _condemn(self, text: ConstraintText, reason: str) -> None:
        text.outcome = Outcome(reason)
        self._keep(text, text.outcome)


class Known(NamedTuple):
    """Outcome of an earlier text, and its record of tokens (ConstraintText.behind)."""

    outcome: Outcome
    behind: bytearray


@dataclass(slots=True)
class Job:
    """Rehearsal, and the matchers that wait for it. deadline: time.monotonic()."""

    text: weakref.ref[ConstraintText]
    client: str
    deadline: float
    matchers: list[weakref.ref[RemoteMatcher]] = field(default_factory=list)


def refusal(reason: str) -> UserError:
    return UserError(f"{PREFIX}{reason}", param="structured_outputs")


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:  # else a fork of the owner ends; the process is not its own
        kill(process)
