"""Parameters of which `make test` runs some and `make test-long` the others. A value that is a tuple is the values of
several arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def all_but_long(values: Iterable[Any], representatives: Collection[Any]) -> list[Any]:
    """The values in order; those that are not among the representatives have the mark `long`."""
    values = list(values)
    assert all(each in values for each in representatives), "a representative is no value"
    return [_cell([value], is_long=value not in representatives) for value in values]


def one_in(share: int, *axes: Iterable[Any]) -> list[Any]:
    """The cells of a matrix. Those in which the places of the values add up to a multiple of `share` are run often, so
    that each value meets others in turn; the rest have the mark `long`."""
    return [
        _cell([value for _, value in places], is_long=sum(place for place, _ in places) % share != 0)
        for places in product(*(enumerate(axis) for axis in axes))
    ]


def pairs(share: int, *axes: Iterable[Any]) -> list[Any]:
    """The cells of a matrix of three axes or more in which each value of an axis meets each of every other one: those
    in which the places add up to a multiple of the shortest axis's length. One in `share` of them is run often; the
    others have the mark `long`."""
    listed = [list(axis) for axis in axes]
    step = min(map(len, listed))
    return [
        _cell([value for _, value in places], is_long=total % (step * share) != 0)
        for places in product(*(enumerate(axis) for axis in listed))
        if (total := sum(place for place, _ in places)) % step == 0
    ]


def _cell(values: Iterable[Any], *, is_long: bool) -> Any:
    arguments = [part for value in values for part in (value if type(value) is tuple else (value,))]
    return pytest.param(*arguments, marks=pytest.mark.long if is_long else ())
