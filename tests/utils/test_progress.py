"""A bar on a terminal, lines of the log elsewhere, and both only when the work takes a while."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from quire.clock import VirtualClock
from quire.utils import progress
from quire.utils.progress import ProgressBar, ProgressLog


@pytest.fixture(autouse=True)
def a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests wait a day (tests/conftest.py)."""
    monkeypatch.setattr(progress, "SHOW_AFTER_SECONDS", 1.0)


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
        with ProgressBar("prompts", 12, make=enabled) as bar:
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


def test_a_bar_of_the_callers_own_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    class Bar:
        postfix = ""

        def __init__(self, **keywords: object) -> None:
            seen.append(keywords)

        def update(self, count: int) -> None:
            seen.append((count, self.postfix))

        def close(self) -> None:
            seen.append("closed")

    with ProgressBar("prompts", 12, make=Bar) as bar:
        bar.update(7, "a")
        bar.update(12, "b")
    assert seen == [{"total": 12, "desc": "prompts", "dynamic_ncols": True}, (7, "a"), (5, "b"), "closed"]


def test_a_notebook_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Terminal, "__module__", "ipykernel.iostream")
    assert "12/12" in shown(monkeypatch, is_terminal=False)


def logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, times: list[float], *, is_terminal: bool = False
) -> list[str]:
    """The lines that updates leave, the one at `times[i]` with i % of the work done."""
    clock = VirtualClock()
    caplog.clear()
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Terminal(is_terminal))
        log = ProgressLog("loading weights (MiB)", 100, clock)
        for completed, time in enumerate(times):
            clock.advance(time - clock.now())
            log.update(completed)
    # Where an earlier test has made the logger keep its records, several handlers catch each.
    return [record.getMessage() for record in dict.fromkeys(caplog.records)]


def test_off_a_terminal_a_line_comes_every_ten_seconds_or_ten_per_cent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = logged(monkeypatch, caplog, [6.0 * step for step in range(6)])
    assert slow == [f"loading weights (MiB): {done} of 100 ({done} %)" for done in (2, 4)]
    fast = logged(monkeypatch, caplog, [0.5 * step for step in range(31)])
    assert fast == [f"loading weights (MiB): {done} of 100 ({done} %)" for done in (10, 20, 30)]
    assert logged(monkeypatch, caplog, [0.009 * step for step in range(101)]) == []
    assert logged(monkeypatch, caplog, [6.0 * step for step in range(6)], is_terminal=True) == []
