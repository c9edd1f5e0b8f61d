"""What a user types: several lines, completed commands, the file of what was typed before."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import DummyInput
from prompt_toolkit.output import DummyOutput

from quire.cli import keyboard
from quire.cli.keyboard import _history, _prompt_session, history_file, is_open, messages_of_pipe, unquoted


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("/s", ["/set", "/stats"]),
        ("/set t", ["temperature", "top_k"]),
        ("/set top_k", ["top_k"]),
        ("/stats t", []),
        ("s", []),
        ("/nothing", []),
    ],
)
def test_commands_and_their_words_are_completed(typed: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prompt_toolkit.output.create_output", lambda **_: DummyOutput())
    commands = {"/set": "sets", "/stats": "shows", "/help": "helps"}
    session = _prompt_session(commands, {"/set": ["temperature", "top_k"]}, InMemoryHistory())
    session.app.input = DummyInput()
    assert session.completer is not None
    found = session.completer.get_completions(Document(typed), CompleteEvent())
    assert [completion.text for completion in found] == words


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ('"""a\nb"""', "a\nb"),
        ('"""\na\n"""\n', "a"),
        ('say """a""" now', 'say """a""" now'),
        ("a\n", "a"),
        (" /x", " /x"),
        ('"""', '"""'),
    ],
)
def test_triple_quotes_around_a_message_are_taken_away(typed: str, message: str) -> None:
    assert unquoted(typed) == message


def test_lines_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('a\n"""b\nc"""\n"""d\ne'))
    assert list(messages_of_pipe()) == ["a\n", '"""b\nc"""\n', '"""d\ne']
    assert is_open('"""d')


def test_the_history_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = history_file()
    assert path == tmp_path / "state" / "quire" / "chat_history"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    path.write_text("kept")
    assert history_file().read_text() == "kept"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_history_that_cannot_be_kept_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise OSError("read-only")

    monkeypatch.setattr(keyboard, "history_file", fail)
    notes: list[str] = []
    assert isinstance(_history(notes.append), InMemoryHistory)
    assert notes == ["what is typed is not kept: read-only"]
