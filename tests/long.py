"""Parameters of which `make test` runs some and `make test-long` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def all_but_long(values: Iterable[Any], representatives: Collection[Any]) -> list[Any]:
    """The values in order; those that are not among the representatives have the mark `long`."""
    values = list(values)
    assert all(each in values for each in representatives), "a representative is no value"
    return [value if value in representatives else pytest.param(value, marks=pytest.mark.long) for value in values]
