"""Lists that rows own, converted once for all rows that have the same one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Source = TypeVar("Source")
Made = TypeVar("Made")


class SharedLists(Generic[Source, Made]):
    """What was made of each row's list. The `n` sequences of a request have the same list object, whose conversion they
    share; it is let go of with the last of them.

    make: converts a list. Rows come in the order in which they were set.
    """

    def __init__(self, make: Callable[[Source], Made]) -> None:
        self._make = make
        self._key_of_row: dict[int, Hashable] = {}
        self._entries: dict[Hashable, tuple[Source, Made, set[int]]] = {}
        """By the identity of the list, which is kept, so that no other one gets it."""

    def set(self, row: int, source: Source) -> None:
        """Give `row` this list, in place of what it had."""
        self.clear(row)
        key = id(source)
        if key not in self._entries:
            self._entries[key] = source, self._make(source), set()
        self._entries[key][2].add(row)
        self._key_of_row[row] = key

    def clear(self, row: int) -> bool:
        """Take the list of `row` away; returns whether it had one."""
        key = self._key_of_row.pop(row, None)
        if key is None:
            return False
        rows = self._entries[key][2]
        rows.remove(row)
        if not rows:
            del self._entries[key]
        return True

    def __len__(self) -> int:
        """Rows that have a list."""
        return len(self._key_of_row)

    def __iter__(self) -> Iterator[tuple[int, Made]]:
        """(row, what was made of its list), for each row that has one."""
        return ((row, self._entries[key][1]) for row, key in self._key_of_row.items())

    def distinct(self) -> Iterator[Made]:
        """What was made of each different list, once."""
        return (made for _, made, _ in self._entries.values())
