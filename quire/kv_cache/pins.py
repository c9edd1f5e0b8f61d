"""Pinned prefixes: the shared prefix of the paper's §4.4, computed once and kept whatever else needs memory.

A pinned prefix owns its blocks as a sequence does, so nobody evicts or preempts them. Its full blocks are found through
the prefix index like any others. Its last, partly filled block cannot be, since it has no hash: it is found here, for a
prompt that starts with all tokens of the prefix and goes on, and copied before the first write, as after a fork.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from quire.kv_cache.block_hash import HashChain
from quire.kv_cache.layout import NULL_BLOCK

if TYPE_CHECKING:
    from quire.kv_cache.manager import SequenceBlocks


class PinnedPrefix:
    """One prefix and the blocks that hold it."""

    __slots__ = ("blocks", "num_tokens", "tail")

    def __init__(self, blocks: SequenceBlocks, num_tokens: int, tail: list[int]) -> None:
        self.blocks = blocks
        self.num_tokens = num_tokens
        self.tail = tail
        """The tokens behind the last full block."""


class Pins:
    """All pinned prefixes, by name and by content."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pins: dict[str, PinnedPrefix] = {}
        self._by_parent: dict[bytes, list[PinnedPrefix]] = {}
        """Hash of the last full block (the chain's root where there is none) -> prefixes, the longest tail first."""
        self._counts: Counter[int] = Counter()

    def __contains__(self, name: str) -> bool:
        return name in self._pins

    def __iter__(self) -> Iterator[PinnedPrefix]:
        return iter(self._pins.values())

    def items(self) -> list[tuple[str, PinnedPrefix]]:
        return list(self._pins.items())

    def holds(self, block: int) -> bool:
        return block in self._counts

    @property
    def num_blocks(self) -> int:
        """Distinct blocks: prefixes may share some."""
        return len(self._counts)

    @property
    def num_empty_slots(self) -> int:
        """Slots of one group's pinned blocks that hold no token."""
        return sum([pin.blocks.capacity - pin.num_tokens for pin in self._pins.values()])

    def add(self, name: str, pin: PinnedPrefix) -> None:
        self._pins[name] = pin
        siblings = self._by_parent.setdefault(self._parent(pin), [])
        siblings.append(pin)
        siblings.sort(key=lambda each: -each.num_tokens)
        self._counts.update(_blocks_of(pin))

    def remove(self, name: str) -> PinnedPrefix:
        """Raises KeyError."""
        pin = self._pins.pop(name)
        siblings = self._by_parent[self._parent(pin)]
        siblings.remove(pin)
        if not siblings:
            del self._by_parent[self._parent(pin)]
        self._counts.subtract(_blocks_of(pin))
        self._counts = +self._counts
        return pin

    def longest(
        self, chain: HashChain, token_ids: Sequence[int], max_tokens: int, min_tokens: int = 0
    ) -> PinnedPrefix | None:
        """The longest prefix of `min_tokens` to `max_tokens` tokens that `token_ids` starts with.

        The chain must be extended over the full blocks of `max_tokens`.
        """
        if not self._pins:
            return None
        size = self._block_size
        for num_blocks in range(max_tokens // size, min_tokens // size - 1, -1):
            for pin in self._by_parent.get(chain.hashes[num_blocks], ()):
                is_in_range = min_tokens <= pin.num_tokens <= max_tokens
                if is_in_range and list(token_ids[num_blocks * size : pin.num_tokens]) == pin.tail:
                    return pin
        return None

    def _parent(self, pin: PinnedPrefix) -> bytes:
        assert pin.blocks.chain is not None
        return pin.blocks.chain.hashes[pin.num_tokens // self._block_size]


def _blocks_of(pin: PinnedPrefix) -> list[int]:
    return [block for table in pin.blocks.tables for block in table if block != NULL_BLOCK]
