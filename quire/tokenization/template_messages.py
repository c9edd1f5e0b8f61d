"""What the process that renders chat templates is told, and what it answers: msgpack in frames over a socket."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal, Protocol

import msgspec

HEADER = struct.Struct("<Q")
"""In front of each message: its length in bytes."""
MAX_SETUP_BYTES = 16 * 2**20
ContentFormat = Literal["auto", "string", "openai"]
"""How a template gets the content of messages: as a string, as a list of parts, or as it asks for it."""

RESERVED_OPTIONS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "tokenizer",
        "truncation",
        "padding",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "raise_exception",
        "strftime_now",
        "range",
        "dict",
        "lipsum",
        "cycler",
        "joiner",
        "namespace",
    }
)
"""Names that are set elsewhere, mean something to Transformers' own method, or are the functions that every template
can call: no template option may take them."""


class TemplateLimits(msgspec.Struct, frozen=True):
    """What one rendering may take. The system enforces the first three, and the parent process the second once more.

    cpu_seconds: of processor time, compiling included. seconds: until the answer, start of the process not included.
    memory: bytes of address space of the whole process (Linux only). queue_seconds: how long a conversation may wait
    for its turn.
    """

    cpu_seconds: float = 2.0
    seconds: float = 10.0
    memory: int = 512 * 2**20
    queue_seconds: float = 30.0

    @property
    def max_conversation_bytes(self) -> int:
        """A longer message is refused before it is sent: the process could not hold it together with its objects."""
        return self.memory // 8


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message. templates: name -> Jinja source. special_tokens: in scope under their names."""

    templates: dict[str, str]
    special_tokens: dict[str, str]
    limits: TemplateLimits


class Render(msgspec.Struct, frozen=True, tag=True):
    """One conversation. template: a name of Setup.templates, unless `source` brings a template of its own. variables:
    `messages` among them, whose content is a string, a list of text parts or None. now: what `strftime_now` tells.
    max_characters: of the text."""

    template: str
    variables: dict[str, Any]
    now: datetime
    max_characters: int
    content_format: ContentFormat = "auto"
    source: str | None = None


class Rendered(msgspec.Struct, frozen=True, tag=True):
    text: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """kind: the template does not compile; it refuses the messages (`raise_exception`); it raised; the text is too
    long; the process ran out of memory or time. reason: for the first three, one line."""

    kind: Literal["invalid", "refused", "failed", "length", "memory", "time"]
    reason: str = ""


class Waiting(Protocol):
    """A limit of the time that the next operations of a connection may take."""

    def apply(self, connection: socket.socket) -> None:
        """Called before each. Raises TimeoutError when it has taken too long."""
        ...


class Deadline:
    """A moment, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def apply(self, connection: socket.socket) -> None:
        """Let the next operation of `connection` wait until then. Raises TimeoutError when the moment has passed."""
        remaining = self._end - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        connection.settimeout(remaining)


def encode_frame(message: msgspec.Struct) -> bytearray:
    """Raises TypeError, OverflowError, RecursionError or UnicodeEncodeError for a value that msgpack does not have."""
    frame = bytearray()
    _ENCODER.encode_into(message, frame, HEADER.size)
    HEADER.pack_into(frame, 0, len(frame) - HEADER.size)
    return frame


def read_frame(connection: socket.socket, max_bytes: int, deadline: Waiting | None = None) -> bytearray | None:
    """The next message, or None at the end of the connection.

    Raises ValueError for a message of more than `max_bytes` and TimeoutError when it is not there in time.
    """
    header = _read(connection, HEADER.size, deadline)
    if header is None:
        return None
    (size,) = HEADER.unpack(header)
    if size > max_bytes:
        raise ValueError(f"a message of {size} bytes, where at most {max_bytes} are expected")
    return _read(connection, size, deadline)


def _read(connection: socket.socket, size: int, deadline: Waiting | None) -> bytearray | None:
    buffer = bytearray(size)
    view = memoryview(buffer)
    filled = 0
    while filled < size:
        if deadline is not None:
            deadline.apply(connection)
        received = connection.recv_into(view[filled:])
        if received == 0:
            return None
        filled += received
    return buffer


def encode_each(values: Iterable[Any]) -> list[msgspec.Raw]:
    """The values as a frame has them, each encoded by a call of its own: no other thread runs during a call. Raises as
    `encode_frame`."""
    return [msgspec.Raw(_ENCODER.encode(value)) for value in values]


def _plain(value: Any) -> Any:
    """Callers of LLM.chat may pass mappings of any kind."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"objects of type {type(value).__name__} cannot be given to a chat template")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
