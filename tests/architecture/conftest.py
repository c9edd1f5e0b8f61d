"""Prints the largest files at the end of every run, so that growth is seen before the limit is met."""

from __future__ import annotations

import pytest

from tests.architecture.test_sizes import largest_files
from tests.closing_words import say


def pytest_collection_finish(session: pytest.Session) -> None:
    say(session.config, "ten largest source files (lines):")
    say(session.config, *(f"{lines:5d}  {path}" for lines, path in largest_files(10)))
