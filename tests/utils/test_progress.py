"""The progress bar appears on a terminal only, and only when the work takes a while."""

from __future__ import annotations

import io
import sys

import pytest

from quire.utils import progress
from quire.utils.progress import ProgressBar


class Terminal(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def shown(
    monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = True, after: float = 0.0, enabled: bool = True
) -> str:
    """What two updates leave on standard error. It is replaced here, not in a fixture: pytest puts its own back."""
    terminal = Terminal(is_terminal)
    with monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "120")
        patch.setattr(sys, "stderr", terminal)
        patch.setattr(progress, "SHOW_AFTER_SECONDS", after)
        with ProgressBar("prompts", 12, enabled=enabled) as bar:
            bar.update(7, "90 tokens")
            bar.update(12, "150 tokens")
    return terminal.getvalue()


def test_it_shows_the_work_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch)
    assert "prompts" in text
    assert "12/12" in text
    assert "150 tokens" in text


def test_quick_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, after=1000.0) == ""


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, enabled=False) == ""


def test_nothing_is_written_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, is_terminal=False) == ""
