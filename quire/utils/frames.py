"""Messages between a process and its helpers: msgpack frames over a socket."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

HEADER = struct.Struct("<Q")
"""Length of the message in bytes."""
READ_BYTES = 2**16


class Waiting(Protocol):
    """Time limit of a connection's next operations."""

    def apply(self, connection: socket.socket) -> None:
        """Prepare for a read. Raises TimeoutError after the limit."""
        ...

    def send(self, connection: socket.socket, content: bytes | bytearray | memoryview) -> None:
        """Send bytes. Raises TimeoutError after the limit."""
        ...


class Deadline:
    """Waiting until a moment, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def apply(self, connection: socket.socket) -> None:
        """The next operation of `connection` may wait until the deadline. Raises TimeoutError after it."""
        remaining = self._end - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        connection.settimeout(remaining)

    def send(self, connection: socket.socket, content: bytes | bytearray | memoryview) -> None:
        self.apply(connection)
        connection.sendall(content)


def encode_frame(message: msgspec.Struct) -> bytearray:
    """Message with its header. Raises TypeError, OverflowError, RecursionError or UnicodeEncodeError for values that
    msgpack lacks."""
    frame = bytearray()
    _ENCODER.encode_into(message, frame, HEADER.size)
    HEADER.pack_into(frame, 0, len(frame) - HEADER.size)
    return frame


def encode(value: Any) -> bytes:
    """Encode a value as in a frame. Raises as `encode_frame`."""
    return _ENCODER.encode(value)


class FrameReader:
    """Reads a connection's messages; short ones in one system call with their header."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._held = b""

    def read(self, max_bytes: int, waiting: Waiting | None = None) -> bytes | bytearray | None:
        """Next message; None at the connection's end. Raises ValueError for more than `max_bytes`, TimeoutError after
        the limit."""
        while len(self._held) < HEADER.size:
            if waiting is not None:
                waiting.apply(self._connection)
            if not (received := self._connection.recv(READ_BYTES)):
                return None
            self._held += received
        (size,) = HEADER.unpack_from(self._held)
        if size > max_bytes:
            raise ValueError(f"a message of {size} bytes, where at most {max_bytes} are expected")
        end = HEADER.size + size
        message, self._held = self._held[HEADER.size : end], self._held[end:]
        return message if len(message) == size else self._rest(message, size, waiting)

    def _rest(self, beginning: bytes, size: int, waiting: Waiting | None) -> bytearray | None:
        buffer = bytearray(size)
        view, filled = memoryview(buffer), len(beginning)
        view[:filled] = beginning
        while filled < size:
            if waiting is not None:
                waiting.apply(self._connection)
            received = self._connection.recv_into(view[filled:])
            if received == 0:
                return None
            filled += received
        return buffer


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"objects of type {type(value).__name__} cannot be given to a chat template")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
