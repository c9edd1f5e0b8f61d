"""The host pool: whole requests out and in, sharing kept, and what `check` catches."""

from __future__ import annotations

import pytest

from quire.kv_cache.block_table import BlockTable
from quire.kv_cache.host_pool import Footprint
from quire.kv_cache.layout import NULL_BLOCK, KVCacheLayout, group_layers
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.spec import AttentionSpec, LayerSpec, SlidingWindowSpec

FULL = AttentionSpec(num_kv_heads=1, key_dim=8, value_dim=8, dtype_bytes=4)
WINDOW = SlidingWindowSpec(num_kv_heads=1, key_dim=8, value_dim=8, dtype_bytes=4, window=6)
TOKENS = list(range(40))


def make_manager(
    specs: tuple[LayerSpec, ...] = (FULL,), num_blocks: int = 20, num_host_blocks: int = 20, caching: bool = False
) -> KVCacheManager:
    groups, layers_per_group = group_layers(specs, 4)
    layout = KVCacheLayout(4, num_blocks + 1, groups, layers_per_group, num_host_blocks)
    return KVCacheManager(layout, enable_prefix_caching=caching)


def start(kv: KVCacheManager, num_tokens: int, salt: str = "") -> BlockTable:
    """A sequence whose first `num_tokens` of TOKENS are computed."""
    chain = kv.new_chain(salt)
    blocks = kv.allocate_prefix(chain, kv.match_prefix(chain, TOKENS, num_tokens - 1))
    assert kv.allocate_slots(blocks, blocks.capacity, num_tokens) is not None
    kv.cache_blocks(blocks, TOKENS, num_tokens)
    kv.check()
    return blocks


class Memory:
    """Contents of both pools, moved as the manager says. A block's content is what it was first called."""

    def __init__(self, sequences: list[BlockTable]) -> None:
        self.device = {block: f"block {block}" for s in sequences for table in s.tables for block in table}
        self.host: dict[int, str] = {}

    def swap_out(self, copies: list[tuple[int, int]] | None) -> None:
        assert copies is not None
        assert len({host for _, host in copies}) == len(copies)
        self.host.update({host: self.device.pop(block) for block, host in copies})

    def swap_in(self, copies: list[tuple[int, int]]) -> None:
        self.device.update({block: self.host[host] for host, block in copies})

    def read(self, blocks: BlockTable) -> list[list[str]]:
        return [[self.device[block] for block in table] for table in blocks.tables]


def test_shared_blocks_are_moved_once_and_stay_shared() -> None:
    kv = make_manager()
    parent = start(kv, 10)
    children = [kv.fork(parent, 10) for _ in range(2)]
    family = [parent, *children]
    growth = kv.allocate_slots(children[1], 10, 15)
    assert growth is not None
    memory = Memory(family)
    before = [memory.read(blocks) for blocks in family]
    assert kv.footprint(family) == Footprint(num_blocks_out=5, num_blocks_in=5, num_retained_blocks=0)
    copies = kv.swap_out(family, [10, 10, 15])
    assert copies is not None
    assert len(copies) == 5, "two full ones and a tail shared by two, a tail's copy and one more"
    memory.swap_out(copies)
    kv.check()
    assert kv.pool.num_used == 0
    assert kv.host.blocks.num_used == 5
    occupant = start(kv, 12)
    assert kv.room_after_swap_in(family) == (20 - 3 - 5, 5)
    memory.swap_in(kv.swap_in(family))
    kv.check()
    assert kv.host.blocks.num_used == kv.host.num_sequences == 0
    assert [memory.read(blocks) for blocks in family] == before
    assert kv.pool.num_shared == 3
    assert [blocks.capacity for blocks in family] == [12, 12, 16]
    growth = kv.allocate_slots(parent, 10, 11)
    assert growth is not None
    assert len(growth.copies) == 1, "the tail is still copied on write"
    for blocks in (*family, occupant):
        kv.free(blocks)
    assert kv.pool.num_used == 0
    kv.check()


def test_without_room_for_all_nothing_moves() -> None:
    kv = make_manager(num_host_blocks=4)
    first, second = start(kv, 8), start(kv, 12)
    assert kv.swap_out([first, second], [8, 12]) is None
    kv.check()
    assert kv.pool.num_used == 5
    assert kv.swap_out([second], [12]) is not None
    assert kv.swap_out([first], [8]) is None
    kv.free(second)
    assert kv.host.blocks.num_used == 0
    assert kv.swap_out([first], [8]) is not None
    kv.check()


def test_windows_leave_only_what_will_be_read() -> None:
    kv = make_manager((FULL, WINDOW))
    blocks = start(kv, 16)
    assert all(NULL_BLOCK not in table for table in blocks.tables)
    copies = kv.swap_out([blocks], [16])
    assert copies is not None
    assert [[block == NULL_BLOCK for block in table] for table in blocks.tables] == [
        [False] * 4,
        [True, True, False, False],
    ]
    assert len(copies) == 6
    assert kv.pool.num_used == 0, "also what had left the window"
    kv.swap_in([blocks])
    assert [[block == NULL_BLOCK for block in table] for table in blocks.tables] == [
        [False] * 4,
        [True, True, False, False],
    ]
    kv.check()


def test_blocks_that_are_still_cached_are_not_copied_back() -> None:
    kv = make_manager(caching=True)
    blocks = start(kv, 15)
    tables = [list(table) for table in blocks.tables]
    kv.swap_out([blocks], [15])
    assert kv.pool.num_evictable == 3
    # Room for all but one: eviction takes the last block of the chain first.
    others = [start(kv, 4, salt=str(number)) for number in range(18)]
    assert kv.pool.num_evictable == 2
    for other in others[:5]:
        kv.free(other)
    assert kv.room_after_swap_in([blocks]) == (5 + 2 - 4, 4)
    copies = kv.swap_in([blocks])
    kv.check()
    assert len(copies) == 2
    assert blocks.tables[0][:2] == tables[0][:2]
    assert blocks.num_committed == 2
    kv.cache_blocks(blocks, TOKENS, 15)
    chain = kv.new_chain("")
    assert kv.match_prefix(chain, TOKENS, 16) == 12, "what came back can be hit again"


def test_blocks_of_others_count_as_free_when_recomputed_and_are_not_copied_back() -> None:
    kv = make_manager(caching=True)
    other = start(kv, 12)
    blocks = start(kv, 17)
    assert blocks.tables[0][:3] == other.tables[0][:3]
    assert kv.footprint([blocks]) == Footprint(num_blocks_out=5, num_blocks_in=2, num_retained_blocks=3)
    assert kv.footprint([other]) == Footprint(num_blocks_out=3, num_blocks_in=0, num_retained_blocks=3)
    copies = kv.swap_out([blocks], [17])
    assert copies is not None
    assert len(copies) == 5, "the other one may end first"
    assert len(kv.swap_in([blocks])) == 1, "the fourth is evictable and not evicted"
    assert kv.pool.num_shared == 3
    kv.check()


def test_a_reset_of_the_cache_costs_copies_only() -> None:
    kv = make_manager(caching=True)
    blocks = start(kv, 15)
    kv.swap_out([blocks], [15])
    kv.reset_prefix_cache()
    assert len(kv.swap_in([blocks])) == 4
    kv.check()


def test_two_copies_of_one_content_become_one() -> None:
    """Siblings may have computed the same block each; the index knows one of the two."""
    kv = make_manager(caching=True)
    first, second = (kv.allocate_prefix(kv.new_chain(""), 0) for _ in range(2))
    for blocks in (first, second):
        assert kv.allocate_slots(blocks, 0, 8) is not None
        kv.cache_blocks(blocks, TOKENS, 8)
    assert not set(first.tables[0]) & set(second.tables[0])
    kv.swap_out([first, second], [8, 8])
    assert kv.room_after_swap_in([first, second]) == (18, 2)
    assert kv.swap_in([first, second]) == []
    assert first.tables == second.tables
    kv.check()


def test_an_undone_append_leaves_everything_as_it_was() -> None:
    kv = make_manager((FULL, WINDOW))
    parent = start(kv, 6)
    children = [kv.fork(parent, 6) for _ in range(2)]
    family = [parent, *children]
    before = [([list(table) for table in s.tables], s.capacity, s.tail_shared) for s in family]
    counts = list(kv.pool.ref_counts)
    growths = [kv.allocate_slots(blocks, 6, 11) for blocks in family]
    assert [len(growth.copies) for growth in growths if growth] == [2, 2, 0], "the last owner writes in place"
    for blocks, growth in reversed(list(zip(family, growths, strict=True))):
        assert growth is not None
        kv.rollback(blocks, growth)
    kv.check()
    assert [(s.tables, s.capacity, s.tail_shared) for s in family] == before
    assert kv.pool.ref_counts == counts


def test_a_swapped_leader_has_no_pending_block() -> None:
    kv = make_manager(caching=True)
    chain = kv.new_chain("")
    assert kv.match_prefix(chain, TOKENS, 40) == 0
    leader = kv.allocate_prefix(chain, 0)
    kv.allocate_slots(leader, 0, 4)
    kv.cache_blocks(leader, TOKENS, 4)
    assert kv.is_pending_in(leader, 10)
    kv.swap_out([leader], [4])
    assert not kv.is_pending_in(leader, 10)
    kv.check()
    kv.swap_in([leader])
    assert kv.is_pending_in(leader, 10)
    kv.check()


@pytest.mark.parametrize("damage", ["entry", "count", "promise"])
def test_check_finds_damage(damage: str) -> None:
    kv = make_manager()
    blocks = start(kv, 8)
    kv.swap_out([blocks], [8])
    kv.check()
    if damage == "entry":
        blocks.tables[0][0] = blocks.tables[0][1]
    elif damage == "count":
        kv.host.blocks.ref_counts[blocks.tables[0][0]] += 1
    else:
        blocks.pending_hash = b"hash"
    with pytest.raises(AssertionError):
        kv.check()
