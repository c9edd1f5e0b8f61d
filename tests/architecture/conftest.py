"""Prints the largest files at the end of every run, so that growth is seen before the limit is met."""

from __future__ import annotations

import pytest

from tests.architecture.test_sizes import largest_files


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_sep("-", "ten largest source files (lines)")
    for lines, path in largest_files(10):
        terminalreporter.write_line(f"{lines:5d}  {path}")
