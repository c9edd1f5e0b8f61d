"""`quire top` against a server process, and against none."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire.cli.main import main
from quire.cli.top import follow
from quire.dashboard.frame import Frame
from quire.errors import QuireError
from tests.fakes.panic import Panic
from tests.server.model_directory import write_model
from tests.server.serve_process import Process

KEY = "schlüssel"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    path = write_model(tmp_path_factory.mktemp("models") / "tiny")
    process = Process(path, api_key=[KEY], served_model_name=["tiny"], shutdown_timeout=1).wait_ready()
    yield process
    process.signal(signal.SIGTERM)
    assert process.finish()[0] == 0


@pytest.fixture
def request_running(server: Process) -> Iterator[None]:
    """A request with four samples, as long as the test lasts."""
    body = {"prompt": "a" * 40, "max_tokens": 200, "n": 4, "temperature": 1.0, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}".encode()}
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body, headers=headers) as response,
    ):
        lines = response.iter_lines()  # kept: without it the client would hang up
        next(lines)
        yield


@pytest.mark.usefixtures("request_running")
def test_once(server: Process, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")  # pytest-xdist sets it to 80
    assert main(["top", server.url + "/", "--once", "--api-key", KEY]) == 0
    printed = capsys.readouterr().out
    assert "Quire tiny" in printed
    assert "1 running  0 preempted  0 swapped  0 waiting  0 pinned" in printed
    assert "shared" in printed
    assert "\x1b" not in printed, "a pipe gets no colours"


def test_the_key_of_the_environment(
    server: Process, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", KEY)
    assert main(["top", server.url, "--once"]) == 0
    assert "no requests" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--once"], []])
def test_a_wrong_key(server: Process, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert main(["top", server.url, "--api-key", "wrong", *flags]) == 2
    error = capsys.readouterr().err
    assert "401: Incorrect API key provided" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("flags", [["--once"], []])
def test_a_server_that_does_not_answer(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert main(["top", url, *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"quire: error: cannot reach {url}: ConnectError")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["localhost:8000"], "'localhost:8000' is no address of a server"),
        (["--rate", "0"], "must be from 0.1 to 10"),
        (["--rate", "11"], "must be from 0.1 to 10"),
        (["--onse"], "did you mean '--once'?"),
        (["--sort", "name"], "invalid choice: 'name'"),
    ],
)
def test_wrong_use(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_server_of_another_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")

        thread = threading.Thread(target=answer)
        thread.start()
        assert main(["top", f"http://127.0.0.1:{listener.getsockname()[1]}", "--once"]) == 2
        thread.join()
    assert "answers 404: Not Found: is it a Quire server of this version?" in capsys.readouterr().err


class Terminal:
    """`quire top` on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quire", "top", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"},
        )
        os.close(slave)
        self.shown = ""

    def read_until(self, text: str) -> None:
        while text not in self.shown:
            self.shown += os.read(self.master, 65536).decode(errors="replace")

    def close(self) -> None:
        """End it whatever it does."""
        self.process.kill()
        self.process.wait()

    def finish(self) -> tuple[int, str]:
        drain = threading.Thread(target=self._drain)
        drain.start()
        assert self.process.stderr is not None
        error = self.process.stderr.read().decode()
        status = self.process.wait()
        drain.join()
        os.close(self.master)
        return status, error

    def _drain(self) -> None:
        try:
            while data := os.read(self.master, 65536):
                self.shown += data.decode(errors="replace")
        except OSError:
            pass  # the other end is closed


@pytest.mark.usefixtures("request_running")
def test_live_and_interrupted(server: Process) -> None:
    terminal = Terminal(server.url, "--api-key", KEY, "--rate", "10")
    try:
        terminal.read_until("1 running")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.finish() == (130, "")
    finally:
        terminal.close()
    assert "\x1b[?1049l" in terminal.shown, "the terminal is as it was before"


def test_q_leaves_and_the_terminal_is_as_it_was(server: Process) -> None:
    terminal = Terminal(server.url, "--api-key", KEY)
    before = termios.tcgetattr(terminal.master)
    try:
        terminal.read_until("Quire")
        while termios.tcgetattr(terminal.master)[3] & termios.ICANON:
            terminal.read_until(terminal.shown + "\x1b")
        os.write(terminal.master, b"xq")
        terminal.process.wait()
        assert termios.tcgetattr(terminal.master) == before
        assert terminal.finish() == (0, "")
    finally:
        terminal.close()


@pytest.mark.usefixtures("request_running")
def test_a_key_changes_the_order(server: Process) -> None:
    terminal = Terminal(server.url, "--api-key", KEY, "--sort", "tokens")
    try:
        terminal.read_until("by tokens")
        os.write(terminal.master, b"s")
        terminal.read_until("by blocks")
        os.write(terminal.master, b"q")
        assert terminal.finish() == (0, "")
    finally:
        terminal.close()


def test_a_pipe_gets_frames(server: Process) -> None:
    command = [sys.executable, "-m", "quire", "top", server.url, "--api-key", KEY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        found = []
        for line in process.stdout:
            found += [line] if "Quire tiny" in line else []
            if len(found) == 2:
                break
        process.kill()
    assert "\x1b" not in "".join(found)


def test_certificates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "https://127.0.0.1:1", "--cacert", str(tmp_path / "none.pem")]) == 2
    assert "is no file of certificates" in capsys.readouterr().err
    assert main(["top", "https://127.0.0.1:1", "--insecure", "--once"]) == 1


def test_the_server_leaves(tmp_path: Path) -> None:
    process = Process(write_model(tmp_path / "tiny"), served_model_name=["tiny"]).wait_ready()
    terminal = Terminal(process.url)
    try:
        terminal.read_until("no requests")
        process.signal(signal.SIGTERM)
        status, error = terminal.finish()
    finally:
        terminal.close()
    assert (status, process.finish()[0]) == (1, 0)
    assert error == f"quire: error: {process.url} closed the connection\n"


@pytest.mark.long
def test_a_reader_that_breaks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the screen would wait for ever for its first frame."""

    class Broken:
        def frames(self, _rate: float) -> Iterator[Frame]:
            raise Panic("index out of bounds")

    with pytest.raises(QuireError, match="cannot be read: Panic: index out of bounds"):
        follow(Broken(), "http://quire", 4.0)  # type: ignore[arg-type]
