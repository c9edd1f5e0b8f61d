"""What a started server tells: its address, the seconds of each phase of the start, and systemd that it serves."""

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
"""For a service manager that does not read what it is told."""


class StartReport:
    """Collects the phases of a start, one after the other."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._rows: list[tuple[str, float]] = []

    def announce(self, model: str) -> None:
        """Say what is being loaded, where standard error is no terminal: the log of a service, or a file."""
        if not sys.stderr.isatty():
            note(__name__, "Quire %s loads %s", __version__, model)

    def phase(self, name: str) -> None:
        """The phase that began where the one before ended ends now."""
        now = time.monotonic()
        self._rows.append((name, now - self._last))
        self._last = now

    def engine_phases(self, seconds: Mapping[str, float]) -> None:
        """The phases of the engine process."""
        self._rows += [(f"engine: {name}", value) for name, value in seconds.items()]

    @property
    def seconds(self) -> dict[str, float]:
        """Phase -> seconds, in the order of their ends. Those of the engine process run beside the server's own."""
        return dict(self._rows)

    def show(self, model_names: Sequence[str], url: str, backend: str) -> None:
        """Print one line with the address, what computes, and the table, to standard output."""
        total = time.monotonic() - self._start
        lines = [
            f"Quire {__version__} serves {', '.join(model_names)} on {url} (ready in {total:.1f} s)",
            f"  {backend}",
        ]
        lines += [f"  {seconds:7.2f} s  {name}" for name, seconds in self._rows]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def tell_systemd(state: str) -> None:
    """Send `state` ("READY=1", "STOPPING=1") to the service manager that started this process with a socket for it
    (`Type=notify`); nothing where there is none. A manager that cannot be reached is logged."""
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
