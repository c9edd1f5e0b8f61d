"""The progress bar shows itself to somebody who watches, and only when the work takes a while."""

from __future__ import annotations

import io
import sys

import pytest

from quire.utils import progress
from quire.utils.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "SHOW_AFTER_SECONDS", 0.0)
    return terminal


def test_it_shows_the_work_on_a_terminal(terminal: Terminal) -> None:
    with ProgressBar("prompts", 12) as bar:
        bar.update(7, "90 tokens")
        bar.update(12, "150 tokens")
    shown = terminal.getvalue()
    assert "prompts" in shown
    assert "12/12" in shown
    assert "150 tokens" in shown


def test_quick_work_shows_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER_SECONDS", 1000.0)
    with ProgressBar("prompts", 2) as bar:
        bar.update(2)
    assert terminal.getvalue() == ""


def test_it_can_be_turned_off(terminal: Terminal) -> None:
    with ProgressBar("prompts", 2, enabled=False) as bar:
        bar.update(2)
    assert terminal.getvalue() == ""


def test_nothing_is_written_where_nobody_watches(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    with ProgressBar("prompts", 2) as bar:
        bar.update(2)
    assert terminal.getvalue() == ""
