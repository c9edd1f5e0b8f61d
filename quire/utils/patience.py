"""Waiting for another process while it computes, and no longer: one that is stopped or hangs is noticed."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

SLICE_SECONDS = 1.0
"""Seconds between two looks. A longer time, because this process did not run, counts as one."""
STALL_SECONDS = 20
"""A process that uses no processor time for as long does not get on."""
TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Patience:
    """Waits for a connection to the process `pid`; in place of a Deadline (quire/utils/frames.py)."""

    def __init__(self, pid: int, stall_slices: float = STALL_SECONDS / SLICE_SECONDS) -> None:
        self._pid = pid
        self._stall_slices = stall_slices
        self._num_idle = 0
        self._seconds: float | None = None

    def apply(self, connection: socket.socket) -> None:
        """Wait until something can be read. Raises TimeoutError when the process does not get on meanwhile."""
        self._wait(connection, select.POLLIN)

    def send(self, connection: socket.socket, content: bytes | bytearray | memoryview) -> None:
        """Send all of it. Raises TimeoutError as `apply`."""
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
    """Seconds of processor time that a process has used; None where the system does not tell (it has no /proc)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / TICK
