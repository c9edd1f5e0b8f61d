"""The browser of the tests; where none is installed they are deselected, and the run says so at its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.closing_words import leave_out
from tests.dashboard.chromium import NAMES, Chromium, browser, find_chromium
from tests.server.conftest import model_path, served

__all__ = ["model_path", "served"]

MISSING = (
    f"{{}} tests of the live page were NOT run: none of {', '.join(NAMES)} is installed "
    "(on Debian and Ubuntu: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = find_chromium()
    assert program is not None, "no chromium, and yet this test was selected"
    with browser(program, tmp_path_factory.mktemp("chromium")) as chromium:
        yield chromium


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if find_chromium() is None:
        leave_out(config, items, lambda item: item.get_closest_marker("browser") is not None, MISSING)
