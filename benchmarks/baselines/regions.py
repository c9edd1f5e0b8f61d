"""One contiguous region of KV slots per sequence, taken whole when its request starts and kept until it ends.

A region is a run of consecutive blocks of the ordinary pool, so that plans, executors and kernels are those of the
paged engine; the block size only says in which units the buddy allocator counts. No block has two owners.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.baselines.buddy import BuddyAllocator, Chunk
from quire.errors import ConfigError
from quire.kv_cache.block_pool import FREE_STATE
from quire.kv_cache.block_table import BlockTable
from quire.kv_cache.layout import NULL_BLOCK, KVCacheLayout


@dataclass(frozen=True, slots=True)
class Region:
    """The slots of one sequence. num_reserved: slots that the policy asked for; num_final: those that the sequence will
    have used at its end; the allocator's rounding is what `chunk` has beyond `num_reserved`."""

    chunk: Chunk
    num_reserved: int
    num_final: int
    blocks: BlockTable


@dataclass(slots=True)
class SlotAccounts:
    """All slots of the pool by the paper's terms (§3.1, Fig. 2); they add up to `total`."""

    total: int
    stored: int = 0
    """Hold keys and values of a token that is still of use."""
    reserved: int = 0
    """Will hold one before their sequence ends."""
    internal: int = 0
    """Reserved by the policy and never used, or used by a sequence that has ended while its batch goes on."""
    rounding: int = 0
    """Beyond what the policy asked for: chunks are powers of two. With `free` the paper's external fragmentation, when
    a request waits that no free chunk can hold."""
    free: int = 0


class Regions:
    """The pool of an engine, handed out in regions. Sequences are known by their ids."""

    has_transfers = can_transfer = False
    """Nothing is cached below the device."""
    knows_stored = True

    def __init__(self, layout: KVCacheLayout) -> None:
        """Raises ConfigError for a model with sliding windows: a region holds every token."""
        if len(layout.groups) != 1 or layout.groups[0].spec.window is not None:
            raise ConfigError("contiguous reservation is there for models whose layers all attend to every token")
        self.block_size = layout.block_size
        self.block_bytes = layout.block_bytes
        self.buddy = BuddyAllocator(layout.num_usable_blocks)
        self._regions: dict[int, Region] = {}

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._regions

    @property
    def num_regions(self) -> int:
        return len(self._regions)

    @property
    def longest(self) -> int:
        """Slots of the largest region that an empty pool has."""
        return self.buddy.largest * self.block_size

    def num_that_fit(self, num_slots: int) -> int:
        """Regions of this size that an empty pool holds at once."""
        exponent = (-(-num_slots // self.block_size) - 1).bit_length()
        return self.buddy.num_units >> exponent

    def reserve(self, seq_ids: list[int], num_slots: int, num_final: int) -> bool:
        """A region for each sequence of a request, or none for any."""
        chunks: list[Chunk] = []
        for _ in seq_ids:
            chunk = self.buddy.allocate(-(-num_slots // self.block_size))
            if chunk is None:
                for taken in reversed(chunks):
                    self.buddy.free(taken)
                return False
            chunks.append(chunk)
        for seq_id, chunk in zip(seq_ids, chunks, strict=True):
            first = NULL_BLOCK + 1 + chunk.start
            table = list(range(first, first + chunk.requested))
            blocks = BlockTable([table], len(table) * self.block_size, None)
            self._regions[seq_id] = Region(chunk, num_slots, num_final, blocks)
        return True

    def blocks(self, seq_id: int) -> BlockTable:
        """The table of a sequence's own region."""
        return self._regions[seq_id].blocks

    def release(self, seq_id: int) -> None:
        self.buddy.free(self._regions.pop(seq_id).chunk)

    def reset_prefix_cache(self) -> int:
        """Nothing is cached."""
        return 0

    @property
    def num_used_blocks(self) -> int:
        return self.buddy.num_units - self.buddy.num_free

    def accounts(self, num_stored: dict[int, int]) -> SlotAccounts:
        """num_stored: tokens in the region of every live sequence; regions that are not named hold nothing of use."""
        size = self.block_size
        accounts = SlotAccounts(total=self.buddy.num_units * size, free=self.buddy.num_free * size)
        for seq_id, region in self._regions.items():
            accounts.rounding += region.chunk.size * size - region.num_reserved
            stored = num_stored.get(seq_id)
            if stored is None:
                accounts.internal += region.num_reserved
                continue
            accounts.stored += stored
            accounts.reserved += region.num_final - stored
            accounts.internal += region.num_reserved - region.num_final
        return accounts

    def states(self) -> bytes:
        """A byte for each block of the pool (KVSnapshot.states): free, or 1 for the one owner of its chunk."""
        states = bytearray([FREE_STATE]) * (self.buddy.num_units + 1)
        for chunk in self.buddy.chunks:
            first = NULL_BLOCK + 1 + chunk.start
            states[first : first + chunk.size] = b"\x01" * chunk.size
        return bytes(states)

    def check(self, seq_ids: set[int]) -> None:
        """Assert that exactly these sequences have a region, and that regions tile the pool."""
        assert self._regions.keys() == seq_ids, f"regions of {self._regions.keys() ^ seq_ids}"
        self.buddy.check()
        assert {region.chunk.start for region in self._regions.values()} == {c.start for c in self.buddy.chunks}
