"""`quire chat --url` in a terminal, beside a server whose answers are given."""

from __future__ import annotations

import http.server
import io
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.cli.vllm import main as vllm

ENDLESS = "count"
WORD = "word "


class Server(http.server.ThreadingHTTPServer):
    """Answers each question with thoughts and Markdown, and ENDLESS until the client hangs up."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.hung_up = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def questions(self) -> list[list[str]]:
        return [[message["content"] for message in body["messages"]] for body in self.bodies]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.respond(200)
        self.wfile.write(b'{"object": "list", "data": [{"id": "one"}, {"id": "two"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        if self.path == "/v1/completions":
            self.respond(200)
            self.event({"choices": [{"index": 0, "text": body["prompt"] + "!"}]})
            self.wfile.write(b"data: [DONE]\n\n")
            return
        question = body["messages"][-1]["content"]
        if question == "refuse":
            self.respond(400)
            self.wfile.write(b'{"error": {"message": "too long"}}')
            return
        self.respond(200)
        if question == "fail":
            self.wfile.write(b'data: {"error": {"message": "out of memory"}}\n\n')
            return
        self.say(reasoning_content="hm")
        try:
            while question == ENDLESS:
                self.say(content=WORD)
        except OSError:
            self.server.hung_up.set()
            return
        for piece in ("**so", f"** {question}", "\n\n\x1b[5m!"):
            self.say(content=piece)
        self.event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}})
        self.wfile.write(b"data: [DONE]\n\n")

    def respond(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()

    def say(self, **delta: str) -> None:
        self.event({"choices": [{"index": 0, "delta": delta}]})

    def event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


class Terminal:
    """`quire chat` on a pseudo-terminal."""

    def __init__(self, *arguments: str, state: Path) -> None:
        self.master, slave = pty.openpty()
        environment = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "XDG_STATE_HOME": str(state)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quire", "chat", *arguments],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # so that Ctrl-C reaches it
            cwd=Path(__file__).parents[2],
            env={**os.environ, **environment},
        )  # fmt: skip
        os.close(slave)
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read_until(self, text: str) -> str:
        """What is shown up to this text, which is taken away."""
        while text not in self.shown:
            shown = os.read(self.master, 65536).decode(errors="replace")
            if "\x1b[6n" in shown:
                self.type("\x1b[1;1R")  # the place of the cursor, which the program asks for
            self.shown += shown
        before, _, self.shown = self.shown.partition(text)
        return before

    def ready(self) -> str:
        return self.read_until("\x1b[?2004h")


def test_a_conversation(server: Server, tmp_path: Path) -> None:
    terminal = Terminal("--url", server.url, "--stats", state=tmp_path)
    terminal.ready()
    terminal.type("one\r")
    shown = terminal.ready()
    assert "hm" in shown
    assert "\x1b[1mso\x1b[0m one" in shown
    assert "␛[5m!" in shown
    assert "\x1b[5m" not in shown
    assert "5 prompt tokens (0 cached), 9 generated" in shown

    terminal.type("\x1b[200~pasted\nlines\x1b[201~")
    terminal.read_until("lines")
    terminal.type("\r")
    terminal.ready()
    terminal.type('"""first\rsecond"""\r')
    terminal.ready()

    terminal.type(f"{ENDLESS}\r")
    terminal.read_until(WORD)
    terminal.type("\x03")
    assert "stopped" in terminal.ready()
    assert server.hung_up.wait(60)
    terminal.type("dropped\x03")
    terminal.ready()
    for question in ("refuse", "fail"):
        terminal.type(f"{question}\r")
        assert {"refuse": "refused: ", "fail": "no answer: out of memory"}[question] in terminal.ready()
    terminal.type("two\r")
    terminal.ready()
    terminal.type("/set tempratur 1\r")
    shown = terminal.ready()
    assert "did you mean 'temperature'?" in shown
    assert "\r\n" in shown[shown.index("known:") : shown.index("frequency_penalty")], "lines end between words"
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
    os.close(terminal.master)

    asked = server.questions()
    assert [each[-1] for each in asked] == [
        "one", "pasted\nlines", "first\nsecond", ENDLESS, "refuse", "fail", "two",
    ]  # fmt: skip
    *before, partial, last = asked[-1]
    assert partial.startswith(WORD)
    assert before == [*asked[2], "**so** first\nsecond\n\n\x1b[5m!", ENDLESS]
    assert last == "two"
    assert {body["model"] for body in server.bodies} == {"one"}
    history = tmp_path / "quire" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "+pasted\n+lines" in history.read_text()


def test_through_a_pipe(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "in").write_text("one\n/stats\n")
    with (tmp_path / "in").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert main(["chat", "two", "--url", server.url, "--top-k", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "**so** one\n\n\x1b[5m!\n"
    assert "9 generated" in captured.err
    assert server.bodies[0]["model"] == "two"
    assert server.bodies[0]["top_k"] == 3


def test_one_question(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", server.url, "-q", "one"]) == 0
    assert capsys.readouterr().out == "**so** one\n\n\x1b[5m!\n"
    assert server.questions() == [["one"]]


def test_completions_by_vllms_command(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert vllm(["complete", "--url", server.url + "/v1", "--max-tokens", "3"]) == 0
    assert vllm(["complete", "--url", server.url + "/v1", "-q", "c"]) == 0
    assert capsys.readouterr().out == "a!\nb!\nc!\n"
    assert [body.get("max_tokens") for body in server.bodies] == [3, 3, None]
