"""Messages of engine core, fork server and forks: msgpack frames over stream sockets."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence

import msgspec

from quire.config.options import EngineOptions
from quire.utils.frames import HEADER, encode_frame

_READ_BYTES = 2**16
MAX_DESCRIPTORS = 4


class RehearsalLimits(msgspec.Struct, frozen=True):
    """Limits of one rehearsal, which the kernel enforces. cpu_seconds: processor seconds of each try; a text that needs
    more is tried again with the next number. seconds: from the request until the verdict. memory: bytes of address
    space above the fork's. stack: bytes; the mask process has twice as many."""

    cpu_seconds: tuple[float, ...] = (0.01, 0.1, 0.5, 2.0)
    seconds: float = 10.0
    memory: int = 2**30
    stack: int = 2**27


LIMITS = RehearsalLimits()


class ForkServerSetup(msgspec.Struct):
    """Setup of a fork server: one line of JSON on its standard input. fd: its end of the connection."""

    options: EngineOptions
    vocab_size: int
    eos_token_ids: list[int]
    fd: int
    limits: RehearsalLimits


class Rehearse(msgspec.Struct, tag=True):
    """To the fork server: compile this text in a fork. deadline: time.monotonic()."""

    job: int
    text: str
    client: str
    deadline: float


class Cancel(msgspec.Struct, tag=True):
    job: int


class StartMasks(msgspec.Struct, tag=True):
    """To the fork server: end the mask process, if any, and fork another. Two descriptors come along: its connection,
    and its memory."""


class Try(msgspec.Struct):
    """To a rehearsing fork: the text to compile, with limits. nice: increment of its niceness."""

    text: str
    cpu_seconds: float
    seconds: float
    nice: int


class Outcome(msgspec.Struct):
    """Result of a rehearsal. reason: why the text cannot be used, in one line. growth: bytes of memory.
    compile_seconds, seconds: processor seconds of compiling and of the first mask."""

    reason: str = ""
    growth: int = 0
    compile_seconds: float = 0.0
    seconds: float = 0.0


class Verdict(msgspec.Struct, tag=True):
    """Message of the fork server. is_final: the text always has this outcome."""

    job: int
    outcome: Outcome
    is_final: bool = True


class New(msgspec.Struct, array_like=True):
    """Work: make a matcher in `slot` that has followed `tokens`. mark: tokens after which the constraint begins.
    allowed: see ConstraintSpec.allowed_token_ids. charge: equal for matchers of one request."""

    slot: int
    serial: int
    grammar: int
    charge: int
    tokens: Sequence[int]
    mark: Sequence[int]
    ignore_eos: bool
    allowed: Sequence[int] | None


class Copy(msgspec.Struct, array_like=True):
    """Work: copy the matcher in `source` to `slot`. wants_mask: report its mask."""

    slot: int
    serial: int
    source: int
    wants_mask: bool


class Advance(msgspec.Struct, array_like=True):
    """Work: follow tokens, and at most `num_forced` forced ones. with_mask: the answer may wait for the mask. drafts:
    guesses after `tokens`, with slots for the masks after each."""

    slot: int
    serial: int
    tokens: Sequence[int]
    num_forced: int
    with_mask: bool
    drafts: Sequence[int] = ()
    draft_slots: Sequence[int] = ()


class Grammar(msgspec.Struct, array_like=True):
    """Rehearsed grammar. compile_seconds, seconds: see Outcome."""

    number: int
    text: str
    compile_seconds: float
    seconds: float


class MaskWork(msgspec.Struct, array_like=True):
    """To the mask process, in order of execution. num_slots: slots that the memory has room for."""

    num_slots: int
    ended_slots: list[int]
    ended_grammars: list[int]
    grammars: list[Grammar]
    copies: list[Copy]
    news: list[New]
    advances: list[Advance]


class MatcherAnswer(msgspec.Struct, array_like=True):
    """Answer of the mask process, with `serial` of its question and attributes of `quire.decoding.masks.Matcher`. only:
    the one possible next token; -1: see the mask. is_free: all tokens are possible. is_masked: the mask is there, or
    `mask_error` says why not. seconds: processor seconds. error: why the matcher cannot continue. num_draft_masks:
    masks after drafts; -1: they come with `Masked`."""

    slot: int
    serial: int
    num_accepted: int
    forced: Sequence[int]
    is_finished: bool
    ends_in_text: bool
    is_free: bool
    only: int
    is_masked: bool
    is_slow: bool
    seconds: float
    error: str = ""
    mask_error: str = ""
    mask_param: str = ""
    num_draft_masks: int = 0


class Masked(msgspec.Struct, array_like=True):
    """A slot's mask is there, and `num_draft_masks` after drafts. error: reason for no mask; param: field of the
    error."""

    slot: int
    serial: int
    seconds: float
    error: str = ""
    param: str = ""
    num_draft_masks: int = 0


class Done(msgspec.Struct, array_like=True):
    """Message of the mask process. Answers come before masks of the same matchers."""

    answers: Sequence[MatcherAnswer]
    masks: Sequence[Masked]


class FrameConnection:
    """Frames over one end of a stream socket pair, without waiting: unsent data is kept for a later `send` or `pump`.
    Used by one thread."""

    def __init__(self, end: socket.socket, *, takes_descriptors: bool = False) -> None:
        """takes_descriptors: open files may come with messages."""
        end.setblocking(False)
        self._socket = end
        self._takes_descriptors = takes_descriptors
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._received = bytearray()
        self._unsent: deque[tuple[bytearray | memoryview, Sequence[int]]] = deque()
        self.descriptors: deque[int] = deque()
        self.is_at_end = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Send or keep a message. descriptors: sent along, then closed here."""
        self._unsent.append((encode_frame(message), descriptors))
        self.pump()

    def pump(self) -> None:
        """Send kept data as far as the socket takes it."""
        while self._unsent:
            data, descriptors = self._unsent[0]
            try:
                if descriptors:
                    sent = socket.send_fds(self._socket, [data], list(descriptors))
                else:
                    sent = self._socket.send(data)
            except BlockingIOError:
                return
            except OSError:
                self.is_at_end = True
                self._drop_unsent()
                return
            for descriptor in descriptors:
                os.close(descriptor)
            if sent == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = memoryview(data)[sent:], ()

    def receive(self) -> list[bytes]:
        """Complete messages. Only `is_at_end` marks the end."""
        while True:
            try:
                if self._takes_descriptors:
                    size = self._receive_with_descriptors()
                else:
                    size = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                break
            except OSError:
                size = 0
            if not size:
                self.is_at_end = True
                break
            if not self._received and is_one_frame(self._buffer, size):
                return [bytes(self._buffer[HEADER.size : size])]
            self._received += self._buffer[:size]
            if size < _READ_BYTES:
                break
        return take_frames(self._received) if self._received else []

    def _receive_with_descriptors(self) -> int:
        data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, MAX_DESCRIPTORS)
        self.descriptors.extend(descriptors)
        self._buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._drop_unsent()
        self._socket.close()

    def _drop_unsent(self) -> None:
        for _, descriptors in self._unsent:
            for descriptor in descriptors:
                os.close(descriptor)
        self._unsent.clear()


def is_one_frame(received: memoryview, size: int) -> bool:
    """True if the first `size` bytes are one whole frame."""
    return size >= HEADER.size and size == HEADER.size + HEADER.unpack_from(received)[0]


def take_frames(received: bytearray) -> list[bytes]:
    """Remove and return the complete messages at the front."""
    frames, start, size = [], 0, len(received)
    while size - start >= HEADER.size:
        (length,) = HEADER.unpack_from(received, start)
        end = start + HEADER.size + length
        if end > size:
            break
        frames.append(bytes(received[start + HEADER.size : end]))
        start = end
    del received[:start]
    return frames


class BlockingReader:
    """Waits for messages of one end of a stream socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def read(self) -> list[bytes]:
        """Wait for at least one message. Empty: the other side is gone."""
        while not (frames := take_frames(self._received)):
            try:
                size = self._socket.recv_into(self._buffer)
            except ConnectionError:
                return []
            if not size:
                return []
            if not self._received and is_one_frame(self._buffer, size):
                return [bytes(self._buffer[HEADER.size : size])]
            self._received += self._buffer[:size]
        return frames
