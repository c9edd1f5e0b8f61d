from __future__ import annotations

from quire.kv_cache.block_hash import HashChain


class BlockTable:
    """Block tables of one sequence, one per group: logical index -> physical block. Only KVCacheManager changes it."""

    __slots__ = (
        "capacity",
        "chain",
        "first_held",
        "is_background",
        "num_committed",
        "pending_hash",
        "tables",
        "tail_shared",
    )

    def __init__(self, tables: list[list[int]], capacity: int, chain: HashChain | None) -> None:
        self.tables = tables
        self.capacity = capacity
        """Tokens that the blocks of every group have room for."""
        self.chain = chain
        self.first_held = [0] * len(tables)
        """First entry of each group's table that may differ from `NULL_BLOCK`."""
        self.is_background = False
        """True for a background request: others do not wait for its blocks."""
        self.num_committed = 0
        """Leading hash blocks offered to the prefix index."""
        self.pending_hash: bytes | None = None
        """Hash of the next block to offer, if its tokens are known."""
        self.tail_shared = False
        """True if the last, partial block may have other owners: copy it before writing (paper §4.4)."""


class BlockAllocation:
    """Changes of one sequence's tables by `allocate_slots`, which the plan tells the workers: appended blocks per
    group, replaced table entries, copies."""

    __slots__ = ("copies", "new_blocks", "replaced", "tail_was_shared")

    def __init__(self, new_blocks: list[list[int]], tail_was_shared: bool) -> None:
        self.new_blocks = new_blocks
        self.tail_was_shared = tail_was_shared
        self.replaced: list[tuple[int, int, int]] = []
        """(group, logical index, new block)."""
        self.copies: list[tuple[int, int]] = []
        """(source, destination), one per entry of `replaced`."""
