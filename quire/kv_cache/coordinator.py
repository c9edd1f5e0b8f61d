"""Agreement of a model's KV groups on prefix hits and block counts. Content is hashed at the greatest common divisor of
the groups' block sizes, the *hash block*. A group with blocks of s hash blocks names block i by the hash of hash block
(i + 1) * s - 1. A hit ends where every group has a full block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from math import gcd, lcm
from typing import Protocol

from quire.kv_cache.layout import NULL_BLOCK, KVGroup
from quire.kv_cache.managers import STATE_WINDOW, ChunkedManager, FullManager, SlidingManager
from quire.kv_cache.prefix_index import Findable, PrefixIndex

UNLIMITED = 2**62
"""Length limit, in tokens, of a model without KV groups."""


class GroupManager(Protocol):
    """Rules of one kind of layers: which blocks of a KV group a sequence needs at a position. Stateless; used by
    Coordinator."""

    block_size: int
    keeps_all: bool
    """True if a sequence keeps every block of this group until it ends."""

    def first_needed_block(self, position: int) -> int:
        """First logical block that queries from `position` on read; earlier ones can be released."""
        ...

    def longest_hit(self, index: Findable, hashes: Sequence[bytes], num_blocks: int) -> int:
        """Blocks of the longest prefix hit, at most `num_blocks` (hashes[i] is block i's)."""
        ...

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Upper bound of the blocks of a sequence of `num_tokens` that computes at most `max_chunk` tokens a step.
        Admission reserves by it."""
        ...


MANAGERS: Mapping[str, Callable[[KVGroup], GroupManager]] = {
    "full": lambda group: FullManager(group.block_size),
    "latent": lambda group: FullManager(group.block_size),
    "sliding": lambda group: SlidingManager(group.block_size, group.spec.window or 1),
    "chunked": lambda group: ChunkedManager(group.block_size, group.spec.window or 1),
    "state": lambda group: SlidingManager(group.block_size, STATE_WINDOW),
}
"""`LayerSpec.kind` -> constructor."""


class Coordinator:
    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self.managers = tuple(MANAGERS[group.spec.kind](group) for group in groups)
        self.sizes = sizes = tuple(manager.block_size for manager in self.managers)
        self.hash_block_size = gcd(*sizes) or 1
        self.hit_size = lcm(*sizes)
        """Tokens; every hit is a multiple of it."""
        self.strides = tuple(size // self.hash_block_size for size in sizes)
        """Hash blocks in each group's block."""

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Sum over all groups of a sequence's maximum blocks."""
        return sum(manager.most_blocks(num_tokens, max_chunk) for manager in self.managers)

    def num_kept_blocks(self, num_tokens: int) -> int:
        """Number of full blocks of `num_tokens` tokens, over the KV groups that keep every block of a sequence. Sizes
        registered prefixes."""
        return sum(num_tokens // manager.block_size for manager in self.managers if manager.keeps_all)

    def blocks_of_siblings(self, num_shared: int, lengths: Sequence[int], max_chunk: int) -> int:
        """Bound on the blocks of forked sequences of these lengths (tokens) with `num_shared` common tokens: full
        shared blocks once and all others per sequence, or each sequence's own maximum."""
        total = 0
        for manager in self.managers:
            size = manager.block_size
            shared = num_shared // size
            together = shared + sum(-(-length // size) - shared for length in lengths)
            total += min(together, sum(map(manager.most_blocks, lengths, repeat(max_chunk))))
        return total

    def num_slots(self, tables: Sequence[Sequence[int]]) -> int:
        """Number of tokens that a sequence's block tables have room for in every group."""
        sizes = [len(table) * manager.block_size for table, manager in zip(tables, self.managers, strict=True)]
        return min(sizes, default=UNLIMITED)

    def fits(self, tables: Sequence[Sequence[int]], num_tokens: int) -> bool:
        """True if block tables have exactly the length that `num_tokens` tokens need."""
        pairs = zip(tables, self.managers, strict=True)
        return all(len(table) == -(-num_tokens // manager.block_size) for table, manager in pairs)

    def agreed_hit(self, indexes: Sequence[Findable], hashes: Sequence[bytes], num_tokens: int) -> int:
        """Number of tokens of the longest prefix hit, of at most `num_tokens` tokens, that all groups have. hashes[i +
        1] is hash block i's."""
        if len(self.managers) == 1:
            (manager,), (index,) = self.managers, indexes
            return manager.longest_hit(index, hashes[1:], num_tokens // self.hash_block_size) * self.hash_block_size
        agreed, num_tokens = -1, num_tokens - num_tokens % self.hit_size
        known_of = {stride: hashes[stride::stride] for stride in set(self.strides)}
        # The hits of windows and states are not closed under shortening, so repeat until all groups agree.
        while agreed != num_tokens:
            agreed = num_tokens
            for manager, index, stride in zip(self.managers, indexes, self.strides, strict=True):
                size = manager.block_size
                num_tokens = manager.longest_hit(index, known_of[stride], num_tokens // size) * size
        return num_tokens

    def hit_tables(self, indexes: Sequence[PrefixIndex], hashes: Sequence[bytes], num_tokens: int) -> list[list[int]]:
        """Tables of a hit: physical blocks, `NULL_BLOCK` where no query looks. hashes: see `agreed_hit`."""
        tables = []
        for manager, index, stride in zip(self.managers, indexes, self.strides, strict=True):
            num_blocks = num_tokens // manager.block_size
            first = min(manager.first_needed_block(num_tokens), num_blocks)
            found = index.find_all(hashes[(first + 1) * stride : num_blocks * stride + 1 : stride])
            tables.append([NULL_BLOCK] * first + found)
        return tables


def padding(groups: Sequence[KVGroup], block_bytes: int, num_tokens: int) -> float:
    """Unused share, between 0 and 1, of one sequence's blocks for `num_tokens` tokens: padding of pages, and pages that
    a group with fewer layers leaves unused. `group_layers` chooses block sizes by it, reports show it."""
    held = unused = 0
    for group in groups:
        blocks = MANAGERS[group.spec.kind](group).most_blocks(num_tokens, 1)
        held += blocks * block_bytes
        unused += blocks * (block_bytes - len(group.layers) * group.page_bytes)
    return unused / held
