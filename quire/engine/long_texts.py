"""Long texts are tokenised in processes of their own: the tokenizers library makes the list of a text's ids in one
call, during which no other thread of the process runs, the one that serves streams included. The same processes read
large request bodies for the server.

The processes start with the first work, are reused, and end with the front end. Work whose caller has left ends the
process that does it, as do a body that takes too much processor time and a process that is stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TypeVar

import msgspec

from quire.config.options import EngineOptions
from quire.errors import EngineDeadError, InternalError, UserError
from quire.tokenization.template_messages import encode_frame, read_frame
from quire.tokenization.tokenizer import SAMPLE, Tokenizer
from quire.utils.child_process import describe_exit, kill, start_interpreter
from quire.utils.patience import STALL_SECONDS, Patience

LONG_TEXT_CHARACTERS = 2**18
"""Shorter texts are tokenised here: the list of their ids is made in 2 ms."""
UNKNOWN_PATTERN_CHARACTERS = 2**8
"""As LONG_TEXT_CHARACTERS, where a tokenizer has regular expressions of its own: some take a time that grows with the
cube of a text or faster, until the library gives up a match after ten million attempts. The worst that was found takes
0.6 s for 256 characters, and 34 s for 4,096."""
TEXT_SECONDS = 10.0
CHARACTER_SECONDS = 1e-4
"""Processor time that a text has, and each of its characters: 50 times what tokenizers take."""
PIECE_TOKENS = 2**16
"""Of the ids that become Python integers at a time. Other threads run between two pieces."""
ID_BYTES = 4
MAX_REPLY_BYTES = 2**40
READ_SECONDS = 10.0
"""Seconds of processor time for one body in a helper process. The system ends the process then."""


T = TypeVar("T")


class Setup(msgspec.Struct):
    """What a process is told: one line of JSON on its standard input. fd: its end of the connection."""

    options: EngineOptions
    vocab_size: int
    fd: int


class Text(msgspec.Struct, tag=True):
    """seconds: processor time that the text has."""

    text: str
    add_special_tokens: bool
    seconds: float


class Bytes(msgspec.Struct, tag=True):
    """To be given to `reader`, as "module:name" a function of `argument` and `content` that returns bytes."""

    reader: str
    argument: str
    content: bytes


class Encoded(msgspec.Struct, tag=True):
    """ids: as `packed` has them."""

    ids: bytes


class Read(msgspec.Struct, tag=True):
    """What `Bytes.reader` returned."""

    content: bytes


class NotEncoded(msgspec.Struct, tag=True):
    """reason: what was wrong; is_user_error: with the text or the bytes."""

    reason: str
    is_user_error: bool


_DECODER = msgspec.msgpack.Decoder(Encoded | Read | NotEncoded)


class Abandonment:
    """Whether the caller of some work has left, and how to end that work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_left = False
        self._end: Callable[[], None] | None = None

    def leave(self) -> None:
        """The caller has left."""
        with self._lock:
            self._has_left = True
            if self._end is not None:
                self._end()

    @contextlib.contextmanager
    def ended_by(self, end: Callable[[], None]) -> Iterator[None]:
        """Around the work, which `end` ends, called on any thread."""
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
"""Of the work that this thread does for a caller on another one."""


class TokenizerProcess:
    """A process with the engine's tokenizer. Used by one thread, except for `kill`. Raises InternalError when it cannot
    be started, or reads another tokenizer than `tokenizer` from its files."""

    def __init__(self, options: EngineOptions, vocab_size: int, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_checked = False
        self.is_usable = True
        """The process can be asked again."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                line = msgspec.json.encode(Setup(options, vocab_size, theirs.fileno()))
                self._process = start_interpreter(
                    "quire.engine.long_texts_process", "quire: texts", line, [theirs.fileno()]
                )
            except OSError as error:
                ours.close()
                raise _failure(f"cannot be started: {error.strerror}") from None
        self._connection = ours
        self._finalizer = weakref.finalize(self, _end, self._process, ours, os.getpid())

    @property
    def pid(self) -> int:
        return self._process.pid

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """As Tokenizer.encode. Raises UserError when that takes too much processor time, and InternalError when the
        process ends or does not get on."""
        if not self._is_checked:
            if listed(self._ask(_timed(SAMPLE, True))) != self._tokenizer.encode(SAMPLE):
                raise _failure("read another tokenizer than this process: its files have changed since the start")
            self._is_checked = True
        return listed(self._ask(_timed(text, add_special_tokens)))

    def read(self, reader: str, argument: str, content: bytes) -> bytes:
        """What the function `reader` of the process makes of `content`; as `encode`. Raises UserError when that takes
        more than READ_SECONDS."""
        return self._ask(Bytes(reader, argument, content))

    def kill(self) -> None:
        """End the process; `encode` of another thread finds the connection closed."""
        self._process.kill()

    def stop(self) -> None:
        """Leave nothing of the process. Idempotent."""
        self._finalizer()

    def _ask(self, work: Text | Bytes) -> bytes:
        self.is_usable = False
        patience = Patience(self.pid)
        try:
            patience.send(self._connection, encode_frame(work))
            reply = read_frame(self._connection, MAX_REPLY_BYTES, patience)
        except ConnectionError:
            reply = None
        except TimeoutError:
            self.kill()
            raise _failure(f"was ended: it had not run for {STALL_SECONDS} s") from None
        if reply is None:
            status = self._process.wait()
            if status == -signal.SIGPROF and isinstance(work, Text):
                raise UserError(
                    f"the tokenizer takes more than {work.seconds:.3g} s of processor time for the text of "
                    f"{len(work.text)} characters"
                )
            if status == -signal.SIGPROF:
                raise UserError(f"the request body takes more than {READ_SECONDS:g} s of processor time to read")
            raise _failure(describe_exit(status))
        self.is_usable = True
        answer = _DECODER.decode(reply)
        if isinstance(answer, Encoded):
            return answer.ids
        if isinstance(answer, Read):
            return answer.content
        raise UserError(answer.reason) if answer.is_user_error else _failure(f"failed: {answer.reason}")


class LongTexts:
    """As many processes as texts were encoded at a time. Thread-safe."""

    def __init__(self, options: EngineOptions, vocab_size: int, tokenizer: Tokenizer) -> None:
        """options, vocab_size: what `tokenizer` was made of (`open_tokenizer`)."""
        self._start: Callable[[], TokenizerProcess] = lambda: TokenizerProcess(options, vocab_size, tokenizer)
        self._lock = threading.Lock()
        self._idle: list[TokenizerProcess] = []
        self._working: set[TokenizerProcess] = set()
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Of the processes that live."""
        with self._lock:
            return [process.pid for process in (*self._idle, *self._working)]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """As Tokenizer.encode. Raises InternalError when the process ends, EngineDeadError after `close`."""
        return self._run(lambda process: process.encode(text, add_special_tokens))

    def read(self, reader: str, argument: str, content: bytes) -> bytes:
        """What the function `reader` ("module:name") makes of `argument` and `content`. Raises as `encode`."""
        return self._run(lambda process: process.read(reader, argument, content))

    def _run(self, work: Callable[[TokenizerProcess], T]) -> T:
        abandonment = ABANDONMENT.get() or Abandonment()
        process = self._take()
        is_left = True
        try:
            with abandonment.ended_by(process.kill):
                result = work(process)
            is_left = False
            return result
        except UserError:
            is_left = False
            raise
        except InternalError:
            self._check_open()
            raise
        finally:
            self._put_back(process, is_usable=process.is_usable and not is_left)

    def close(self) -> None:
        """End the processes, and fail what waits for them. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for process in self._working:
                process.kill()
        for process in idle:
            process.stop()

    def _take(self) -> TokenizerProcess:
        with self._lock:
            self._check_open()
            process = self._idle.pop() if self._idle else self._start()
            self._working.add(process)
            return process

    def _put_back(self, process: TokenizerProcess, *, is_usable: bool) -> None:
        with self._lock:
            self._working.discard(process)
            is_usable = is_usable and not self._is_closed
            if is_usable:
                self._idle.append(process)
        if not is_usable:
            process.stop()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineDeadError("the engine was shut down")


def _timed(text: str, add_special_tokens: bool) -> Text:
    return Text(text, add_special_tokens, TEXT_SECONDS + CHARACTER_SECONDS * len(text))


def packed(ids: Sequence[int]) -> bytes:
    """Token ids as ID_BYTES bytes each in the machine's order."""
    return array("I", ids).tobytes()


def listed(ids: bytes) -> list[int]:
    """The ids of `packed`. Other threads run in between."""
    numbers = memoryview(ids).cast("I")
    token_ids: list[int] = []
    for start in range(0, len(numbers), PIECE_TOKENS):
        token_ids += numbers[start : start + PIECE_TOKENS].tolist()
    return token_ids


def _failure(what: str) -> InternalError:
    return InternalError(
        f"the process that reads and tokenises long texts {what}",
        summary="the text could not be tokenised for lack of a process",
    )


def _end(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    """Also runs at the end of the interpreter."""
    if os.getpid() != owner:
        return  # a fork of the owner ends; the process is not its own
    kill(process)
    connection.close()
