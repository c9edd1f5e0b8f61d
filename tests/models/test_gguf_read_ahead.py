"""Making the next items of an iterator while the last ones are used."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from quire.models.gguf.weights import read_ahead


def test_items_come_in_order_from_another_thread() -> None:
    def items() -> Generator[tuple[int, int], None, None]:
        for number in range(20):
            yield number, threading.get_ident()

    found = list(read_ahead(items(), 3))
    assert [number for number, _ in found] == list(range(20))
    assert {thread for _, thread in found} != {threading.get_ident()}
    assert len({thread for _, thread in found}) == 1


def test_the_next_item_is_made_meanwhile() -> None:
    made = threading.Event()

    def items() -> Generator[int, None, None]:
        yield 0
        made.set()
        yield 1

    found = read_ahead(items(), 1)
    assert next(found) == 0
    assert made.wait(60), "without asking for it"


def test_an_error_comes_in_its_place() -> None:
    def items() -> Generator[int, None, None]:
        yield 0
        yield 1
        raise ValueError("the third")

    found = read_ahead(items(), 2)
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(ValueError, match="the third"):
        next(found)


def test_ended_early_it_closes_the_items() -> None:
    closed: list[bool] = []

    def items() -> Generator[int, None, None]:
        try:
            while True:
                yield 0
        finally:
            closed.append(True)

    found = read_ahead(items(), 2)
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert closed == [True]
