"""Waiting for another process while it computes."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

SLICE_SECONDS = 1.0
"""Seconds between two looks. A longer gap, because this process did not run, counts as one."""
STALL_SECONDS = 20
"""Seconds without processor time after which a process makes no progress."""
TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Patience:
    """Waits for a connection to the process `pid`; replaces a Deadline (quire/utils/frames.py)."""

    def __init__(self, pid: int, stall_slices: float = STALL_SECONDS / SLICE_SECONDS) -> None:
        self._pid = pid
        self._stall_slices = stall_slices
        self._num_idle = 0
        self._seconds: float | None = None

    def apply(self, connection: socket.socket) -> None:
        """Wait until something can be read. Raises TimeoutError if the process makes no progress meanwhile."""
        self._wait(connection, select.POLLIN)

    def send(self, connection: socket.socket, content: bytes | bytearray | memoryview) -> None:
        """Send bytes. Raises TimeoutError as `apply`."""
        view = memoryview(content)
        while view:
            self._wait(connection, select.POLLOUT)
            try:
                view = view[connection.send(view, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                continue

    def _wait(self, connection: socket.socket, event: int) -> None:
        poller = select.poll()
        poller.register(connection, event)
        self._num_idle = 0
        while not poller.poll(int(1000 * SLICE_SECONDS)):
            seconds = processor_seconds(self._pid)
            self._num_idle = self._num_idle + 1 if seconds is not None and seconds == self._seconds else 0
            self._seconds = seconds
            if self._num_idle >= self._stall_slices:
                raise TimeoutError


def processor_seconds(pid: int) -> float | None:
    """Processor seconds that a process has used; None without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / TICK
