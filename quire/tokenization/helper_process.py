"""Helper process: renders chat templates, tokenizes long texts, reads large request bodies (pool: helpers.py). It ends
with its parent."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from quire.tokenization.jobs import (
    MAX_JOB_BYTES,
    MAX_SETUP_BYTES,
    Answer,
    Answered,
    Encoded,
    Failed,
    Read,
    Refused,
    Render,
    Rendered,
    Setup,
    Text,
    packed,
    seconds_of,
)
from quire.tokenization.template_renderer import TemplateRenderer
from quire.utils.child_process import watch_parent
from quire.utils.frames import HEADER, FrameReader, encode_frame

if TYPE_CHECKING:
    from quire.tokenization.tokenizer import Tokenizer

DEADLY = (signal.SIGPROF, signal.SIGALRM)
_JOBS = msgspec.msgpack.Decoder(Render | Text | Read)


class HelperLoop:
    def __init__(self, setup: Setup, connection: socket.socket, reader: FrameReader) -> None:
        self._setup = setup
        self._connection = connection
        self._reader = reader
        self._renderer = TemplateRenderer(setup)
        self._tokenizer: Tokenizer | None = None
        self._is_confined = False
        """True while the memory limit for rendering applies: usage before the first one plus one rendering's share."""

    def do(self, job: bytes | bytearray) -> None:
        try:
            work = _JOBS.decode(job)
        except RecursionError:
            work = None
        if isinstance(work, Text):
            self._send(self._encode(work.text, work.add_special_tokens, work.seconds))
            return
        content = self._reader.read(MAX_JOB_BYTES)
        if content is None:
            raise ConnectionError
        if isinstance(work, Read):
            found = self._read(work, content)
            self._send(Answered() if isinstance(found, bytes) else found)
            if isinstance(found, bytes):
                self._connection.sendall(HEADER.pack(len(found)))
                self._connection.sendall(found)
            return
        answer = self._render(work, content) if work else _too_deep()
        self._send(answer)
        if isinstance(answer, Rendered) and answer.is_long:
            assert work is not None
            assert work.tokenising is not None
            how, seconds = work.tokenising, seconds_of(answer.text)
            self._send(self._encode(answer.text, how.add_special_tokens, seconds, how.max_model_len))

    def _send(self, answer: Answer) -> None:
        self._connection.sendall(encode_frame(answer))

    def _render(self, work: Render, messages: bytes | bytearray) -> Rendered | Failed:
        limits, how = self._setup.limits, work.tokenising
        if not self._is_confined:
            _limit(resource.RLIMIT_AS, _address_space() + limits.memory)
            self._is_confined = True
        _set_timers(limits.cpu_seconds, limits.seconds)
        try:
            answer = self._renderer.answer(work, messages)
        except RecursionError:
            answer = _too_deep()
        except MemoryError:
            answer = Failed("memory")
        finally:
            _set_timers(0, 0)
        if isinstance(answer, Rendered) and how is not None and len(answer.text) > how.inline_characters:
            return Rendered(answer.text, is_long=True)
        return answer

    def _encode(
        self, text: str, add_special_tokens: bool, seconds: float, max_model_len: int | None = None
    ) -> Encoded | Refused:
        """Token ids of a text. seconds: limit of processor time. max_model_len: count the tokens first if the text may
        exceed it (`check_num_tokens`)."""
        from quire.tokenization.text_lengths import check_num_tokens

        with self._answering(seconds) as refused:
            tokenizer = self._open_tokenizer()
            if max_model_len is not None:
                check_num_tokens(tokenizer, text, max_model_len, "messages")
            return Encoded(packed(tokenizer.encode(text, add_special_tokens)))
        return refused[0]

    def _read(self, work: Read, content: bytes | bytearray) -> bytes | Refused | Failed:
        memory = work.limits.memory
        try:
            with self._answering(work.limits.seconds) as refused:
                from quire.registry import load_target

                reader = load_target(work.reader)
                if memory is not None:
                    _limit(resource.RLIMIT_AS, _address_space() + memory)
                found = reader(work.argument, bytes(content))
                assert isinstance(found, bytes)
                return found
        except MemoryError:
            if memory is None:
                raise
            return Failed("memory")
        finally:
            _limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
        return refused[0]

    @contextlib.contextmanager
    def _answering(self, seconds: float) -> Iterator[list[Refused]]:
        """Let the system kill this process (SIGPROF) after `seconds` of processor time, and collect no garbage
        meanwhile."""
        from quire.errors import QuireError

        refused: list[Refused] = []
        self._is_confined = False
        _limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        gc.disable()
        try:
            yield refused
        except QuireError as error:
            refused.append(Refused(type(error).__name__, str(error), getattr(error, "param", None)))
        finally:
            gc.enable()
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _open_tokenizer(self) -> Tokenizer:
        """Engine's tokenizer. Raises InternalError if its files have changed."""
        if self._tokenizer is None:
            from quire.config.options import EngineOptions
            from quire.errors import InternalError
            from quire.tokenization.tokenizer import SAMPLE, open_tokenizer

            source = self._setup.tokenizer
            assert source is not None, "the parent has a tokenizer"
            found = open_tokenizer(msgspec.json.decode(source.options, type=EngineOptions), source.vocab_size)
            assert found is not None, "the parent has a tokenizer"
            if source.sample_ids is not None and packed(found.encode(SAMPLE)) != source.sample_ids:
                raise InternalError("read another tokenizer than this process: its files have changed since the start")
            self._tokenizer = found
        return self._tokenizer


def main() -> None:
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return  # the parent ended before it sent the work
    # The parent decides what a signal to all processes of a service means, and ends this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch_parent(lambda: None)
    connection = socket.socket(fileno=int(line))
    reader = FrameReader(connection)
    frame = reader.read(MAX_SETUP_BYTES)
    if frame is None:
        return
    worker = HelperLoop(msgspec.msgpack.decode(frame, type=Setup), connection, reader)
    _be_silent()
    try:
        while (frame := reader.read(MAX_JOB_BYTES)) is not None:
            worker.do(frame)
    except ConnectionError:
        pass  # the parent has ended
    os._exit(0)


def _too_deep() -> Failed:
    return Failed("failed", "RecursionError: the variables are nested too deeply")


def _be_silent() -> None:
    for number in DEADLY:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DEADLY)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    _limit(resource.RLIMIT_CORE, 0)


def _limit(kind: int, value: int) -> None:
    if kind == resource.RLIMIT_AS and sys.platform != "linux":
        return  # other systems know the name, but refuse or ignore the value
    _, hard = resource.getrlimit(kind)
    if value == resource.RLIM_INFINITY or (hard != resource.RLIM_INFINITY and value > hard):
        value = hard
    resource.setrlimit(kind, (value, hard))


def _address_space() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _set_timers(cpu_seconds: float, seconds: float) -> None:
    """Set timers with which the system ends the process in any state, even without a parent."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds)
