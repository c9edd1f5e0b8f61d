"""What the KV groups of one model agree on: how long a prefix hit is, which blocks it needs, and how many blocks a
sequence takes.

Each group has a block size of its own. Content is hashed at their greatest common divisor, the *hash block*: a group
whose blocks are s hash blocks long names its block i by the hash of hash block (i + 1) * s - 1, which covers all tokens
up to there. A hit ends where every group has a full block, at a multiple of the least common multiple of the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from math import gcd, lcm
from typing import Protocol

from quire.kv_cache.layout import NULL_BLOCK, KVGroup
from quire.kv_cache.managers import STATE_WINDOW, ChunkedManager, FullManager, SlidingManager
from quire.kv_cache.prefix_index import Findable, PrefixIndex

UNLIMITED = 2**62
"""Tokens that a sequence may have where nothing is kept of them."""


class GroupManager(Protocol):
    """How a sequence uses the blocks of one KV group."""

    block_size: int
    """Tokens."""
    keeps_all: bool
    """Whether a sequence keeps every block until it ends."""

    def first_needed_block(self, position: int) -> int:
        """The first logical block that a query at `position` (or later) reads; earlier ones can be given back."""
        ...

    def longest_hit(self, index: Findable, hashes: Sequence[bytes], num_blocks: int) -> int:
        """The largest hit of at most `num_blocks` blocks (hashes[i] is block i's)."""
        ...

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most, computing at most `max_chunk` tokens a step."""
        ...


MANAGERS: Mapping[str, Callable[[KVGroup], GroupManager]] = {
    "full": lambda group: FullManager(group.block_size),
    "latent": lambda group: FullManager(group.block_size),
    "sliding": lambda group: SlidingManager(group.block_size, group.spec.window or 1),
    "chunked": lambda group: ChunkedManager(group.block_size, group.spec.window or 1),
    "state": lambda group: SlidingManager(group.block_size, STATE_WINDOW),
}
"""By `LayerSpec.kind`."""


class Coordinator:
    """The managers of a layout's groups, in the groups' order."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self.managers = tuple(MANAGERS[group.spec.kind](group) for group in groups)
        self.sizes = sizes = tuple(manager.block_size for manager in self.managers)
        """Per group: tokens of a block."""
        self.block_size = gcd(*sizes) or 1
        """Tokens of a hash block (of no use without groups)."""
        self.hit_size = lcm(*sizes)
        """Tokens: a hit is a multiple of it."""
        self.strides = tuple(size // self.block_size for size in sizes)
        """Per group: hash blocks of one of its blocks."""

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Blocks that one sequence of `num_tokens` holds at most, over all groups."""
        return sum(manager.most_blocks(num_tokens, max_chunk) for manager in self.managers)

    def num_kept_blocks(self, num_tokens: int) -> int:
        """Full blocks of `num_tokens` tokens in the groups that keep every block of a sequence."""
        return sum(num_tokens // manager.block_size for manager in self.managers if manager.keeps_all)

    def blocks_of_siblings(self, num_shared: int, lengths: Sequence[int], max_chunk: int) -> int:
        """Most blocks of forked sequences of these lengths (tokens), the first `num_shared` of them shared: full shared
        blocks once, all other blocks per sequence; or what each may hold by itself."""
        total = 0
        for manager in self.managers:
            size = manager.block_size
            shared = num_shared // size
            together = shared + sum(-(-length // size) - shared for length in lengths)
            total += min(together, sum(map(manager.most_blocks, lengths, repeat(max_chunk))))
        return total

    def num_slots(self, tables: Sequence[Sequence[int]]) -> int:
        """Tokens that block tables have room for in every group; without groups any number."""
        sizes = [len(table) * manager.block_size for table, manager in zip(tables, self.managers, strict=True)]
        return min(sizes, default=UNLIMITED)

    def fits(self, tables: Sequence[Sequence[int]], num_tokens: int) -> bool:
        """Whether block tables are as long as `num_tokens` tokens need, and no longer."""
        pairs = zip(tables, self.managers, strict=True)
        return all(len(table) == -(-num_tokens // manager.block_size) for table, manager in pairs)

    def agreed_hit(self, indexes: Sequence[Findable], hashes: Sequence[bytes], num_tokens: int) -> int:
        """The longest hit, of at most `num_tokens` tokens, that all groups have. hashes[i + 1]: of hash block i."""
        if len(self.managers) == 1:
            (manager,), (index,) = self.managers, indexes
            return manager.longest_hit(index, hashes[1:], num_tokens // self.block_size) * self.block_size
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
        """The tables of a hit: physical blocks, `NULL_BLOCK` where no query will look. hashes as for `agreed_hit`."""
        tables = []
        for manager, index, stride in zip(self.managers, indexes, self.strides, strict=True):
            num_blocks = num_tokens // manager.block_size
            first = min(manager.first_needed_block(num_tokens), num_blocks)
            found = index.find_all(hashes[(first + 1) * stride : num_blocks * stride + 1 : stride])
            tables.append([NULL_BLOCK] * first + found)
        return tables


def padding(groups: Sequence[KVGroup], block_bytes: int, num_tokens: int) -> float:
    """The share of the blocks of one sequence of `num_tokens` tokens that no layer can use, between 0 and 1: pages
    that are larger than what a layer keeps, and pages of a group with fewer layers."""
    held = unused = 0
    for group in groups:
        blocks = MANAGERS[group.spec.kind](group).most_blocks(num_tokens, 1)
        held += blocks * block_bytes
        unused += blocks * (block_bytes - len(group.layers) * group.page_bytes)
    return unused / held
