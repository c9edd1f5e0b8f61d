"""Messages between a process and its helpers: msgpack in frames over a socket."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

HEADER = struct.Struct("<Q")
"""In front of each message: its length in bytes."""


class Waiting(Protocol):
    """A limit of the time that the next operations of a connection may take."""

    def apply(self, connection: socket.socket) -> None:
        """Called before each read. Raises TimeoutError when it has taken too long."""
        ...

    def send(self, connection: socket.socket, content: bytes | bytearray | memoryview) -> None:
        """Send all of it. Raises as `apply`."""
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

    def send(self, connection: socket.socket, content: bytes | bytearray | memoryview) -> None:
        self.apply(connection)
        connection.sendall(content)


def encode_frame(message: msgspec.Struct) -> bytearray:
    """Raises TypeError, OverflowError, RecursionError or UnicodeEncodeError for a value that msgpack does not have."""
    frame = bytearray()
    _ENCODER.encode_into(message, frame, HEADER.size)
    HEADER.pack_into(frame, 0, len(frame) - HEADER.size)
    return frame


def encode(value: Any) -> bytes:
    """A value as a frame has it. Raises as `encode_frame`."""
    return _ENCODER.encode(value)


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


def _plain(value: Any) -> Any:
    """Callers of LLM.chat may pass mappings of any kind."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"objects of type {type(value).__name__} cannot be given to a chat template")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
