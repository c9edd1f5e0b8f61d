"""Keeps the parsed files while they are read. Prints the largest files and the size of each room at the end of every
run, so that growth is seen before a limit is met."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.architecture import source
from tests.architecture.test_sizes import largest_files, room_sizes
from tests.closing_words import say


@pytest.fixture(scope="package", autouse=True)
def parsed_files() -> Iterator[None]:
    """Every file is parsed once for all of these tests. The garbage collector would walk the trees all along."""
    gc.disable()
    yield
    for cached in (source.imports, source.modules, source.tree_of):
        cached.cache_clear()
    gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    say(session.config, "ten largest source files (lines):")
    say(session.config, *(f"{lines:5d}  {path}" for lines, path in largest_files(10)))
    sizes = room_sizes()
    rooms = ", ".join(f"{room} {lines:,}" for room, lines in sorted(sizes.items(), key=lambda size: -size[1]))
    say(session.config, f"lines of each room: {rooms}; {sum(sizes.values()):,} in all")
