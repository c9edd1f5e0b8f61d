"""Where Ray is not installed, its tests are deselected, and the run says so at its end."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.closing_words import leave_out

MISSING = "{} tests of Ray's ranks were left out: Ray is not installed (pip install 'quire-llm[ray]')"


@pytest.fixture(scope="module", autouse=True)
def processes(copied_processes: None) -> None:
    """Ranks are copies of a warm interpreter, but those of `fresh_interpreters`."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if find_spec("ray") is None:
        leave_out(config, items, lambda item: item.get_closest_marker("ray") is not None, MISSING)
