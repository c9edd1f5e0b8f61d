"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """Result of a push: text that may be shown, and the stop string found, if any."""

    text: str
    stop: str | None


class StopTable:
    """Automaton of a set of stop strings, shared by a request's sequences. Each node is the longest suffix of the text
    that begins a stop string; node 0 is the root."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.stop_at: list[str | None] = [None]
        """Longest stop string that ends at each node."""
        self._fail = [0]
        for stop in stops:
            self._insert(stop)
        self._link()
        self.first_characters = frozenset(self.next[0])

    def step(self, node: int, char: str) -> int:
        while (target := self.next[node].get(char)) is None:
            if node == 0:
                return 0
            node = self._fail[node]
        return target

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self.next[node]:
                self.next[node][char] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[node] + 1)
                self.stop_at.append(None)
                self._fail.append(0)
            node = self.next[node][char]
        self.stop_at[node] = stop

    def _link(self) -> None:
        queue = list(self.next[0].values())
        for node in queue:
            for char, child in self.next[node].items():
                self._fail[child] = self.step(self._fail[node], char)
                self.stop_at[child] = self.stop_at[child] or self.stop_at[self._fail[child]]
                queue.append(child)


class StopStrings:
    """Search for a text's first stop string (Aho-Corasick).

    The first to be complete wins, then the longest; text that may begin one is held back.
    """

    def __init__(self, table: StopTable, include_in_output: bool = False) -> None:
        self._include = include_in_output
        self._table = table
        self._node = 0
        self._held = ""
        """Last `depth(node)` characters: the beginning of a stop string."""

    def push(self, text: str) -> StopMatch:
        """Search new text. After a match, push no more."""
        table, node = self._table, self._node
        if node == 0 and table.first_characters.isdisjoint(text):
            return StopMatch(text, None)
        for position, char in enumerate(text):
            node = table.step(node, char)
            stop = table.stop_at[node]
            if stop is not None:
                seen = self._held + text[: position + 1]
                self._held = ""
                return StopMatch(seen if self._include else seen[: len(seen) - len(stop)], stop)
        self._node = node
        seen = self._held + text
        safe = len(seen) - table.depth[node]
        self._held = seen[safe:]
        return StopMatch(seen[:safe], None)

    def flush(self) -> str:
        """Text held back."""
        held, self._held, self._node = self._held, "", 0
        return held
