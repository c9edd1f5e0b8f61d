"""Block rules by kind of layer: which blocks a prefix hit needs, and which a sequence can give back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.kv_cache.layout import NULL_BLOCK
from quire.kv_cache.prefix_index import PrefixIndex
from quire.kv_cache.spec import LayerSpec, SlidingWindowSpec


class Findable(Protocol):
    """An index of block contents by hash."""

    def find(self, block_hash: bytes) -> int | None:
        """A block with this content, None when there is none."""
        ...


class FullAttentionRules:
    """Every block is needed until the sequence ends."""

    keeps_all = True

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def first_needed_block(self, position: int) -> int:
        """The first block that a query at `position` (or later) reads."""
        return 0

    def longest_hit(self, index: Findable, hashes: Sequence[bytes], num_blocks: int) -> int:
        """The largest hit of at most `num_blocks` blocks (hashes[i] is block i's). Any shorter one is a hit too."""
        for block in range(num_blocks):
            if index.find(hashes[block]) is None:
                return block
        return num_blocks

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most, computing at most `max_chunk` tokens a step."""
        return -(-num_tokens // self._block_size)


class SlidingWindowRules(FullAttentionRules):
    """A query at position p reads positions p - window + 1 .. p only."""

    keeps_all = False

    def __init__(self, block_size: int, window: int) -> None:
        super().__init__(block_size)
        self._window = window

    def first_needed_block(self, position: int) -> int:
        return max(0, position - self._window + 1) // self._block_size

    def longest_hit(self, index: Findable, hashes: Sequence[bytes], num_blocks: int) -> int:
        """A hit of h blocks needs only those that the next query reads; look from the longest down."""
        hit = num_blocks
        while hit > 0:
            first = self.first_needed_block(hit * self._block_size)
            missing = next((b for b in range(hit - 1, first - 1, -1) if index.find(hashes[b]) is None), None)
            if missing is None:
                return hit
            hit = missing
        return 0

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        span = min(num_tokens, self._window - 1 + max_chunk)
        # A span of s tokens can start inside a block and so touch one block more than ceil(s / block size).
        touched = (span + self._block_size - 2) // self._block_size + 1
        return min(super().most_blocks(num_tokens, max_chunk), touched)


def rules_for(spec: LayerSpec, block_size: int) -> FullAttentionRules:
    if isinstance(spec, SlidingWindowSpec):
        return SlidingWindowRules(block_size, spec.window)
    return FullAttentionRules(block_size)


def agreed_hit(
    rules: Sequence[FullAttentionRules], indexes: Sequence[Findable], hashes: Sequence[bytes], num_blocks: int
) -> int:
    """The longest hit, of at most `num_blocks` blocks, that all KV groups have."""
    # Sliding-window hits are not closed under shortening, so repeat until all groups agree.
    agreed = None
    while agreed != num_blocks:
        agreed = num_blocks
        for each, index in zip(rules, indexes, strict=True):
            num_blocks = each.longest_hit(index, hashes, num_blocks)
    return num_blocks


def hit_blocks(
    rules: FullAttentionRules, index: PrefixIndex, hashes: Sequence[bytes], num_blocks: int, block_size: int
) -> list[int]:
    """The table of a hit: physical blocks, `NULL_BLOCK` where no query will look."""
    first = rules.first_needed_block(num_blocks * block_size)
    table = [NULL_BLOCK] * min(first, num_blocks)
    for block in range(first, num_blocks):
        found = index.find(hashes[block])
        assert found is not None, "a hit was found and is gone"
        table.append(found)
    return table
