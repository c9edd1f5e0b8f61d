"""A server on a socket that systemd keeps: connections wait while it restarts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.errors import ConfigError
from quire.server.listener import bind
from quire.server.settings import ServerSettings
from tests.long import all_but_long
from tests.server.serve_process import LONG, ROOT, SCRIPT


class Supervisor:
    """What systemd does: it listens, and starts servers with its socket as descriptor 3."""

    def __init__(self, model_path: Path, count: int) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        options = {"model": str(model_path), "num_blocks_override": 64, "max_num_seqs": 4}
        settings = {"port": 1, "shutdown_timeout": 3, "api_server_count": count}
        self._arguments = json.dumps([options, settings, "tests.server.executor:slow_between_signals"])
        self.popen: subprocess.Popen[str] | None = None

    def start(self) -> str:
        """Start a server; return the line that says it is ready."""
        number = self.socket.fileno()
        script = f'export LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=http; exec "$@" 3<&{number}'
        self.popen = subprocess.Popen(
            ["bash", "-c", script, "bash", sys.executable, "-c", SCRIPT, self._arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            pass_fds=[number],
        )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert " serves " in line, self.popen.communicate()
        return line

    def close(self) -> None:
        self.socket.close()
        if self.popen is not None:
            self.popen.kill()
            self.popen.communicate()


@pytest.fixture
def supervisor(model_path: Path, request: pytest.FixtureRequest) -> Iterator[Supervisor]:
    made = Supervisor(model_path, request.param)
    yield made
    made.close()


@pytest.mark.parametrize("supervisor", all_but_long([1, 2], [1]), indirect=True)
def test_connections_wait_during_a_restart(supervisor: Supervisor) -> None:
    """A connection that comes while the old server drains is not refused: the next server answers it."""
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(httpx.get(f"{supervisor.url}/health", timeout=120).status_code)

    assert supervisor.url in supervisor.start(), "the address is the socket's, not the options'"
    first = supervisor.popen
    assert first is not None
    assert httpx.get(f"{supervisor.url}/health", timeout=60).status_code == 200
    with (
        httpx.Client(base_url=supervisor.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=LONG) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        first.send_signal(signal.SIGTERM)
        assert first.stderr is not None
        while "shutting down" not in first.stderr.readline():
            pass
        asking = threading.Thread(target=ask)
        asking.start()
        assert '"abort"' in "".join(lines), "the running request had its time"
    first.communicate()
    assert first.returncode == 0
    assert statuses == []
    supervisor.start()
    asking.join()
    assert statuses == [200]
    assert supervisor.popen is not None
    supervisor.popen.send_signal(signal.SIGTERM)
    _, error = supervisor.popen.communicate()
    assert supervisor.popen.returncode == 0, error
    supervisor.socket.getsockname()  # it is still the supervisor's


def test_sockets_of_others_and_several_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    monkeypatch.setenv("LISTEN_FDS", "1")
    with bind(ServerSettings(port=0)) as listener:
        assert not listener.is_inherited
    assert "LISTEN_FDS" not in os.environ
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "2")
    with pytest.raises(ConfigError, match="systemd passes 2 sockets"):
        bind(ServerSettings(port=0))


def _datagrams() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def _without_path() -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(f"\0quire-test-{os.getpid()}")
    made.listen()
    return made


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: open(os.devnull), "passes no socket"),  # noqa: SIM115 - the test closes it
        (_datagrams, "of another kind"),
        (_without_path, "of another kind"),
        (lambda: socket.socketpair()[0], "of another kind"),
    ],
    ids=["file", "datagrams", "without a path", "connected"],
)
def test_what_is_no_listening_socket_is_refused(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], message: str
) -> None:
    with make() as passed:
        monkeypatch.setattr("quire.server.listener.FIRST_INHERITED", os.dup(passed.fileno()))
        monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
        monkeypatch.setenv("LISTEN_FDS", "1")
        with pytest.raises(ConfigError, match=message):
            bind(ServerSettings(port=0))
