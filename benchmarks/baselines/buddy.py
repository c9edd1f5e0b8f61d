"""A buddy allocator: contiguous chunks whose sizes are powers of two.

The paper assumes it of Orca (§6.1). A chunk of 2^k units begins at a multiple of 2^k; its buddy is the other half of
the chunk of twice the size. A pool whose size is no power of two begins as one chunk for each bit of the size, the
largest first.
"""

from __future__ import annotations

from typing import NamedTuple


class Chunk(NamedTuple):
    """Units `start` .. `start + size - 1`, of which `requested` were asked for."""

    start: int
    size: int
    requested: int


class BuddyAllocator:
    """Hands out runs of consecutive units from 0 .. `num_units` - 1. The smallest chunk that is large enough is taken;
    among equals the one that became free last."""

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self.num_free = num_units
        self._free: list[dict[int, None]] = [{} for _ in range(num_units.bit_length())]
        """By exponent: where free chunks start, in the order in which they became free."""
        self._chunks: dict[int, Chunk] = {}
        start = 0
        for exponent in reversed(range(num_units.bit_length())):
            if num_units >> exponent & 1:
                self._free[exponent][start] = None
                start += 1 << exponent

    @property
    def largest(self) -> int:
        """The largest chunk that an empty pool has: more consecutive units can never be had."""
        return 1 << (self.num_units.bit_length() - 1) if self.num_units else 0

    @property
    def largest_free(self) -> int:
        """The largest chunk that can be had now; 0: none."""
        return next((1 << exponent for exponent in reversed(range(len(self._free))) if self._free[exponent]), 0)

    def allocate(self, num_units: int) -> Chunk | None:
        """A chunk of at least `num_units` (> 0), None when no free one is large enough."""
        assert num_units > 0, "an empty chunk"
        wanted = (num_units - 1).bit_length()
        exponent = next((e for e in range(wanted, len(self._free)) if self._free[e]), None)
        if exponent is None:
            return None
        start, _ = self._free[exponent].popitem()
        while exponent > wanted:
            exponent -= 1
            self._free[exponent][start + (1 << exponent)] = None
        chunk = Chunk(start, 1 << wanted, num_units)
        self._chunks[start] = chunk
        self.num_free -= chunk.size
        return chunk

    def free(self, chunk: Chunk) -> None:
        """Give a chunk back. It merges with its buddy as long as that one is free, too."""
        assert self._chunks.pop(chunk.start, None) == chunk, f"{chunk} was not handed out"
        self.num_free += chunk.size
        start, exponent = chunk.start, chunk.size.bit_length() - 1
        while exponent + 1 < len(self._free) and (start ^ (1 << exponent)) in self._free[exponent]:
            del self._free[exponent][start ^ (1 << exponent)]
            start &= ~(1 << exponent)
            exponent += 1
        self._free[exponent][start] = None

    @property
    def chunks(self) -> list[Chunk]:
        """What is handed out."""
        return list(self._chunks.values())

    def check(self) -> None:
        """Assert that free and used chunks tile the pool, aligned, and that no two buddies are both free."""
        spans = [(chunk.start, chunk.size) for chunk in self._chunks.values()]
        for exponent, starts in enumerate(self._free):
            spans += [(start, 1 << exponent) for start in starts]
            for start in starts:
                assert start ^ (1 << exponent) not in starts, f"two free buddies of {1 << exponent} at {start}"
        end = 0
        for start, size in sorted(spans):
            assert start == end, f"units {end} to {start} are lost or handed out twice"
            assert start % size == 0, f"a chunk of {size} begins at {start}"
            end = start + size
        assert end == self.num_units, f"{self.num_units - end} units are lost"
        assert self.num_free == self.num_units - sum(chunk.size for chunk in self._chunks.values())
