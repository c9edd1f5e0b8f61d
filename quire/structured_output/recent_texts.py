"""Results for texts, of which the ones asked for longest ago are forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class RecentTexts(Generic[T]):
    """Results by their texts, bounded by number and characters. Used by one thread at a time."""

    def __init__(self, size_of: Callable[[str, T], int]) -> None:
        """size_of: characters of one text with its result; those of a result that replaces another do not change."""
        self._size_of = size_of
        self.entries: OrderedDict[str, T] = OrderedDict()
        """The one asked for last is last."""
        self.num_characters = 0

    def get(self, text: str) -> T | None:
        found = self.entries.get(text)
        if found is not None:
            self.entries.move_to_end(text)
        return found

    def put(self, text: str, result: T, max_entries: int, max_characters: int) -> None:
        """Keep a result, and forget others until both bounds hold."""
        if text not in self.entries:
            self.num_characters += self._size_of(text, result)
        self.entries[text] = result
        self.entries.move_to_end(text)
        while len(self.entries) > max_entries or self.num_characters > max_characters:
            self.num_characters -= self._size_of(*self.entries.popitem(last=False))
