"""Pool of a front end's helper processes (helper_process.py). They start on demand and are reused. One that exceeds a
limit, hangs or dies fails only its job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

import msgspec

from quire.errors import ChatTemplateProcessError, EngineDeadError, InternalError, QuireError, UserError, named_error
from quire.tokenization.jobs import (
    BODY_LIMITS,
    MAX_JOB_BYTES,
    MAX_SETUP_BYTES,
    Answer,
    Answered,
    Encoded,
    Failed,
    Read,
    ReadLimits,
    Refused,
    Rendered,
    Setup,
    TemplateLimits,
    Text,
    listed,
    seconds_of,
)
from quire.utils.child_process import kill, start_interpreter
from quire.utils.fair_threads import FairThreads
from quire.utils.frames import HEADER, Deadline, FrameReader, Waiting, encode_frame
from quire.utils.patience import STALL_SECONDS, Patience
from quire.utils.sizes import format_bytes

LONG_TEXT_CHARACTERS = 2**18
"""Length from which a helper tokenizes a text."""
UNKNOWN_PATTERN_CHARACTERS = 2**8
"""Same limit for a tokenizer with patterns of its own: the worst known takes 0.6 s for 256 characters, 34 s for
4,096."""
START_SECONDS = 60.0
GRACE_SECONDS = 1.0
"""Time after a rendering helper's own timers before this side kills it, in seconds."""
JOINED_BYTES = 64 * 2**10
"""Maximum size of a job sent in one piece, so the helper wakes once."""
MAX_BYTES_PER_CHARACTER = 4
REPLY_OVERHEAD_BYTES = 16 * 2**10

_FAULTS = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL)
"""Statuses of a process that a library's fault ended, as where memory ends."""
_ANSWERS = msgspec.msgpack.Decoder(Answer)

T = TypeVar("T")


class Conversion(NamedTuple):
    """Conversation that a helper renders. frame: encoded Render. messages: msgpack behind it. max_characters: limit of
    the text."""

    frame: bytearray
    messages: memoryview
    max_characters: int

    @property
    def size(self) -> int:
        return len(self.frame) + len(self.messages)


class Rendering(NamedTuple):
    """Rendered text, with token ids if the helper made them."""

    text: str
    token_ids: list[int] | None = None


class Abandonment:
    """State of a job's caller, and the way to end the job if the caller leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_left = False
        self._end: Callable[[], None] | None = None

    def leave(self) -> None:
        """End the job: its caller has left."""
        with self._lock:
            self._has_left = True
            if self._end is not None:
                self._end()

    @contextlib.contextmanager
    def ended_by(self, end: Callable[[], None]) -> Iterator[None]:
        """Run the block, which `end` aborts from any thread. Raises InternalError if the caller has left."""
        with self._lock:
            if self._has_left:
                raise InternalError("the caller of this work has left")
            self._end = end
        try:
            yield
        finally:
            with self._lock:
                self._end = None


ABANDONMENT: ContextVar[Abandonment | None] = ContextVar("abandonment", default=None)
"""Abandonment of this thread's job for a caller on another thread."""


async def in_turn(threads: FairThreads, size: int, work: Callable[[], T]) -> T:
    """Run `work` on one of the threads. Cancelling also ends the job in its helper."""
    abandonment = Abandonment()

    def abandonable() -> T:
        ABANDONMENT.set(abandonment)
        try:
            return work()
        finally:
            ABANDONMENT.set(None)

    try:
        return await asyncio.wrap_future(threads.submit(size, abandonable))
    except asyncio.CancelledError:
        abandonment.leave()
        raise


class Helper:
    """Helper process: renders templates, tokenises, reads. One thread at a time, except for `kill`. Raises OSError if
    it cannot start."""

    def __init__(self, setup: Setup) -> None:
        self._limits = setup.limits
        self._start_seconds = START_SECONDS
        self._setup_frame: bytes | bytearray = encode_frame(setup)
        self.is_usable = True
        """True if the process can take another job."""
        self.is_killed = False
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                line = str(theirs.fileno()).encode()
                self._process = start_interpreter(
                    "quire.tokenization.helper_process", "quire: helper", line, [theirs.fileno()]
                )
            except BaseException:
                ours.close()
                raise
        self._connection = ours
        self._reader = FrameReader(ours)
        self._finalizer = weakref.finalize(self, _end, self._process, ours, os.getpid())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def render(self, work: Conversion) -> Rendering | Failed:
        """Render a conversation. A process that exceeded a limit becomes unusable. Raises ChatTemplateProcessError if
        it ends for another reason; for a long text also as `encode` does."""
        max_bytes = work.max_characters * MAX_BYTES_PER_CHARACTER + REPLY_OVERHEAD_BYTES
        deadline = Deadline(self._start_seconds + self._limits.seconds + GRACE_SECONDS)
        try:
            answer = self._ask([work.frame, HEADER.pack(len(work.messages)), work.messages], deadline, max_bytes)
        except TimeoutError:
            self.kill()
            return Failed("time")
        except (ValueError, msgspec.DecodeError) as error:
            raise _of_template(f"sent {error}") from None
        if answer is None:
            status = self._exit_status(GRACE_SECONDS)
            if status in (-signal.SIGPROF, -signal.SIGALRM):
                return Failed("time")
            raise _of_template(_describe(status))
        if isinstance(answer, Failed):
            self.is_usable = answer.kind != "memory"  # the memory it still holds is unknown
            return answer
        assert isinstance(answer, Rendered)
        if answer.is_long:
            return Rendering(answer.text, self._ids(answer.text))
        self.is_usable = True
        return Rendering(answer.text)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encode as Tokenizer.encode does. Raises UserError beyond the processor time, InternalError if the process
        ends or stalls."""
        return self._ids(text, encode_frame(Text(text, add_special_tokens, seconds_of(text))))

    def read(self, reader: str, argument: str, content: Sequence[bytes], limits: ReadLimits) -> bytes | bytearray:
        """Call the function `reader` in the process. Raises as `encode` does; UserError beyond the limits, and for
        bytes with a memory limit that make the process fail."""
        header = HEADER.pack(sum(map(len, content)))
        too_slow = UserError(
            f"{limits.what} takes more than {limits.seconds:g} s of processor time to read", param=limits.param
        )
        failed = UserError(f"{limits.what} makes its reader fail, and may be damaged", param=limits.param)
        parts: list[bytes | bytearray] = [encode_frame(Read(reader, argument, limits)), header, *content]
        with (ABANDONMENT.get() or Abandonment()).ended_by(self.kill):
            answer = self._patiently(parts, too_slow, None if limits.memory is None else failed)
        if isinstance(answer, Failed):
            raise UserError(
                f"{limits.what} takes more than {format_bytes(limits.memory or 0)} of memory to read",
                param=limits.param,
            )
        assert isinstance(answer, Answered)
        found = self._reader.read(MAX_JOB_BYTES, Patience(self.pid))
        if found is None:
            raise _of_text(_describe(self._exit_status(None)))
        self.is_usable = True
        return found

    def kill(self) -> None:
        """End the process; another thread's request finds the connection closed."""
        self.is_killed = True  # first: the process lives on for a moment
        self._process.kill()

    def stop(self) -> None:
        """End and reap the process. Idempotent."""
        self._finalizer()

    def _ids(self, text: str, *parts: bytearray) -> list[int]:
        """Ask for ids. parts: request; empty if a conversation's answer already asks for the ids."""
        too_slow = (
            f"the tokenizer takes more than {seconds_of(text):.3g} s of processor time for the text of "
            f"{len(text)} characters"
        )
        with (ABANDONMENT.get() or Abandonment()).ended_by(self.kill):
            answer = self._patiently(parts, UserError(too_slow))
        assert isinstance(answer, Encoded)
        self.is_usable = True
        return listed(answer.ids)

    def _patiently(
        self, parts: Sequence[bytes | bytearray], too_slow: UserError, failed: UserError | None = None
    ) -> Answer:
        """Ask without a timeout here. too_slow: error if the process's own limit ends it. failed: error if a fault of
        its own does (None: InternalError)."""
        self._connection.settimeout(None)
        try:
            answer = self._ask(parts, Patience(self.pid), MAX_JOB_BYTES)
        except TimeoutError:
            self.kill()
            raise _of_text(f"was ended: it had not run for {STALL_SECONDS} s") from None
        if answer is None:
            status = self._exit_status(None)
            if status == -signal.SIGPROF:
                raise too_slow
            raise failed if failed is not None and status in _FAULTS else _of_text(_describe(status))
        if isinstance(answer, Refused):
            error = named_error(answer.error, answer.message, answer.param)
            self.is_usable = isinstance(error, UserError)
            raise error if self.is_usable else _of_text(f"failed: {answer.message}")
        return answer

    def _ask(self, parts: Sequence[bytes | bytearray | memoryview], waiting: Waiting, max_bytes: int) -> Answer | None:
        self.is_usable = False
        try:
            parts = [part for part in (self._setup_frame, *parts) if part]
            if sum(map(len, parts)) <= JOINED_BYTES:
                parts = [b"".join(parts)]
            for part in parts:
                waiting.send(self._connection, part)
            self._setup_frame = b""
            reply = self._reader.read(max_bytes, waiting)
        except ConnectionError:
            return None
        if reply is not None:
            self._start_seconds = 0.0
        return None if reply is None else _ANSWERS.decode(reply)

    def _exit_status(self, seconds: float | None) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


class Helpers:
    """Pool with as many processes as there were jobs at a time. Thread-safe: each job runs on its caller's thread."""

    def __init__(self, setup: Setup) -> None:
        self.limits: TemplateLimits = setup.limits
        self._invalid = _wrong_with(setup)
        self._setup = setup if self._invalid is None else msgspec.structs.replace(setup, templates={})
        self.has_tokenizer = setup.tokenizer is not None
        self._lock = threading.Lock()
        self._idle: list[Helper] = []
        self._working: set[Helper] = set()
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return [helper.pid for helper in (*self._idle, *self._working)]

    def render(self, work: Conversion) -> Rendering | Failed:
        """See Helper.render. Raises UserError for templates that cannot be sent, ChatTemplateProcessError if the
        process cannot start, EngineDeadError after `close`."""
        if self._invalid is not None:
            raise UserError(f"the model's chat template is not valid: {self._invalid}", param="messages")
        return self._run(lambda helper: helper.render(work), _of_template)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """See Helper.encode. Raises EngineDeadError after `close`."""
        return self._run(lambda helper: helper.encode(text, add_special_tokens), _of_text)

    def read(
        self, reader: str, argument: str, content: Sequence[bytes], limits: ReadLimits = BODY_LIMITS
    ) -> bytes | bytearray:
        """See Helper.read. reader: "module:name" of the function."""
        return self._run(lambda helper: helper.read(reader, argument, content, limits), _of_text)

    def close(self) -> None:
        """End the processes and fail their jobs. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for helper in self._working:
                helper.kill()
        for helper in idle:
            helper.stop()

    def _run(self, work: Callable[[Helper], T], failure: Callable[[str], QuireError]) -> T:
        try:
            helper = self._take()
        except OSError as error:
            raise failure(f"cannot be started: {error.strerror}") from None
        try:
            return work(helper)
        except (InternalError, ChatTemplateProcessError):
            self._check_open()
            raise
        finally:
            self._put_back(helper)

    def _take(self) -> Helper:
        with self._lock:
            self._check_open()
            while self._idle:
                helper = self._idle.pop()
                if helper.is_alive:
                    break
                helper.stop()
            else:
                helper = Helper(self._setup)
            self._working.add(helper)
            return helper

    def _put_back(self, helper: Helper) -> None:
        with self._lock:
            self._working.discard(helper)
            if is_usable := helper.is_usable and not helper.is_killed and not self._is_closed:
                self._idle.append(helper)
        if not is_usable:
            helper.stop()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineDeadError("the engine was shut down")


def _wrong_with(setup: Setup) -> str | None:
    try:
        size = len(encode_frame(setup))
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    return f"it is larger than {format_bytes(MAX_SETUP_BYTES)}" if size > MAX_SETUP_BYTES else None


def _of_template(what: str) -> ChatTemplateProcessError:
    return ChatTemplateProcessError(f"the process that renders chat templates {what}")


def _of_text(what: str) -> InternalError:
    return InternalError(
        f"the process that reads and tokenises long texts {what}",
        summary="the text could not be tokenised for lack of a process",
    )


def _describe(status: int | None) -> str:
    if status is None:
        return "closed its connection"
    if status < 0:
        return f"was killed by signal {-status} ({signal.strsignal(-status)})"
    return f"ended with status {status}"


def _end(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the owner is ending, and the process is not the fork's
    kill(process)
    connection.close()
