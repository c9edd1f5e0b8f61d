"""Standard output and error that can always be written to: what cannot be written is lost and counted."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PATIENCE_SECONDS = 0.2
"""Seconds to wait for a reader. While it reads nothing, later writes are lost."""
PIECE_BYTES = select.PIPE_BUF
"""Bytes that a writable pipe certainly takes."""


class GuardedFile(io.FileIO):
    """File descriptor for writing. `write` never raises OSError, and waits at most PATIENCE_SECONDS."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)
        self._poller = select.poll()
        self._poller.register(fd, select.POLLOUT)
        self._lock = threading.Lock()
        self._is_stuck = self._is_torn = False
        self._num_lost = 0

    def take_num_lost(self) -> int:
        with self._lock:
            count, self._num_lost = self._num_lost, 0
            return count

    def write(self, content: ReadableBuffer, /) -> int:
        view = memoryview(content).cast("B")
        num_bytes = len(view)
        with self._lock:
            try:
                if self._is_torn and self._is_writable():
                    self._is_torn = not super().write(b"\n")  # behind the line that was begun
                while view and self._is_writable():
                    view = view[super().write(view[:PIECE_BYTES]) or 0 :]
            except OSError:
                pass
            if view:
                self._num_lost += 1
                self._is_torn = self._is_torn or len(view) < num_bytes
        return num_bytes

    def flush(self) -> None:
        """Do nothing."""

    def _is_writable(self) -> bool:
        self._is_stuck = not self._poller.poll(0 if self._is_stuck else int(1000 * PATIENCE_SECONDS))
        return not self._is_stuck


def guard_streams(*names: str) -> None:
    """Route `sys.stdout` or `sys.stderr`, by `names`, through GuardedFile, unless the program has replaced them."""
    _open_closed()
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if name not in names or (stream is not None and stream is not getattr(sys, f"__{name}__")):
            continue
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        encoding, errors = (stream.encoding, stream.errors) if stream is not None else ("utf-8", "backslashreplace")
        file = io.TextIOWrapper(
            GuardedFile(fd),
            encoding=encoding,
            errors=errors,
            line_buffering=True,
            write_through=True,
        )
        setattr(sys, name, file)


def take_num_lost(stream: object) -> int:
    """`GuardedFile.take_num_lost` of a text stream; 0 for others."""
    file = getattr(stream, "buffer", None)
    return file.take_num_lost() if isinstance(file, GuardedFile) else 0


def _open_closed() -> None:
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            found = os.open(os.devnull, os.O_RDWR)
            if found != fd:
                os.dup2(found, fd)
                os.close(found)
            os.set_inheritable(fd, True)
