"""Report of a started server: address and phase durations to standard output, readiness to systemd."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping, Sequence

from quire import envs
from quire.logging import get_logger, note
from quire.version import __version__

logger = get_logger(__name__)

NOTIFY_SECONDS = 1.0
"""Timeout for a service manager that does not read, in seconds."""


class StartReport:
    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._rows: list[tuple[str, float]] = []

    def announce(self, model: str) -> None:
        """Log the model being loaded, unless standard error is a terminal."""
        if not sys.stderr.isatty():
            note(__name__, "Quire %s loads %s", __version__, model)

    def phase(self, name: str) -> None:
        """End a phase (such as loading) of the start, which began when the phase before ended."""
        now = time.monotonic()
        self._rows.append((name, now - self._last))
        self._last = now

    def engine_phases(self, seconds: Mapping[str, float]) -> None:
        self._rows += [(f"engine: {name}", value) for name, value in seconds.items()]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, in order of their ends."""
        return dict(self._rows)

    def show(self, model_names: Sequence[str], url: str, backend: str) -> None:
        total = time.monotonic() - self._start
        lines = [
            f"Quire {__version__} serves {', '.join(model_names)} on {url} (ready in {total:.1f} s)",
            f"  {backend}",
        ]
        lines += [f"  {seconds:7.2f} s  {name}" for name, seconds in self._rows]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def tell_systemd(state: str) -> None:
    """Send `state` ("READY=1", "STOPPING=1") to systemd (`Type=notify`), if it started this process. Failures are
    logged."""
    address = envs.notify_socket()
    if address is None:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as client:
            client.settimeout(NOTIFY_SECONDS)
            client.connect(address)
            client.send(state.encode())
    except OSError as error:
        logger.warning("the service manager cannot be told %s: %s", state, error)
