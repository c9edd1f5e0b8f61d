from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class RecentTexts(Generic[T]):
    """Cache of results by constraint's text, bounded in number and characters, least recently used out first. Used by
    one thread at a time."""

    def __init__(self, size_of: Callable[[str, T], int]) -> None:
        """size_of: characters of a text with its result; a replacing result must have the same."""
        self._size_of = size_of
        self.entries: OrderedDict[str, T] = OrderedDict()
        """Entries by text, the most recently used last."""
        self.num_characters = 0

    def get(self, text: str) -> T | None:
        found = self.entries.get(text)
        if found is not None:
            self.entries.move_to_end(text)
        return found

    def put(self, text: str, result: T, max_entries: int, max_characters: int) -> None:
        """Keep a result, and drop others until both bounds hold."""
        if text not in self.entries:
            self.num_characters += self._size_of(text, result)
        self.entries[text] = result
        self.entries.move_to_end(text)
        while len(self.entries) > max_entries or self.num_characters > max_characters:
            self.num_characters -= self._size_of(*self.entries.popitem(last=False))
