"""The KV manager alone: growth, waste, sharing, copy-on-write, prefix hits, windows, and what `check` catches."""

from __future__ import annotations

import dataclasses

import pytest

from quire.kv_cache.block_table import BlockTable
from quire.kv_cache.coordinator import Coordinator
from quire.kv_cache.layout import NULL_BLOCK, KVCacheLayout, group_layers
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.prefix_index import PrefixIndex
from quire.kv_cache.spec import AttentionSpec, LayerSpec, SlidingWindowSpec

FULL = AttentionSpec(num_kv_heads=1, key_dim=8, value_dim=8, dtype_bytes=4)
WINDOW = SlidingWindowSpec(num_kv_heads=1, key_dim=8, value_dim=8, dtype_bytes=4, window=6)


def make_manager(
    specs: tuple[LayerSpec, ...] = (FULL,), num_blocks: int = 20, block_size: int = 4, caching: bool = True
) -> KVCacheManager:
    groups, layers_per_group = group_layers(specs, block_size)
    layout = KVCacheLayout(block_size, num_blocks + 1, groups, layers_per_group)
    return KVCacheManager(layout, enable_prefix_caching=caching)


def start(kv: KVCacheManager, token_ids: list[int], salt: str = "") -> BlockTable:
    """A sequence whose tokens are all computed."""
    chain = kv.new_chain(salt)
    blocks = kv.allocate_prefix(chain, kv.match_prefix(chain, token_ids, len(token_ids) - 1))
    assert kv.allocate_slots(blocks, blocks.capacity, len(token_ids)) is not None
    kv.cache_blocks(blocks, token_ids, len(token_ids))
    kv.check()
    return blocks


def test_blocks_come_on_demand_and_waste_less_than_one() -> None:
    kv = make_manager()
    blocks = kv.allocate_prefix(kv.new_chain(""), 0)
    for num_tokens in range(1, 40):
        growth = kv.allocate_slots(blocks, num_tokens - 1, num_tokens)
        assert growth is not None
        assert len(growth.new_blocks[0]) == (1 if num_tokens % 4 == 1 else 0)
        assert 0 <= blocks.capacity - num_tokens < kv.hash_block_size
        kv.check()
    kv.free(blocks)
    assert kv.pool.num_used == 0


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    kv = make_manager(num_blocks=3)
    blocks = start(kv, list(range(9)))
    other = kv.allocate_prefix(kv.new_chain(""), 0)
    assert kv.allocate_slots(other, 0, 4) is None
    assert other.tables == [[]]
    kv.check()
    kv.free(blocks)
    assert kv.allocate_slots(other, 0, 12) is not None


def test_a_fork_shares_and_the_partial_block_is_copied_once_for_all_but_the_last_owner() -> None:
    kv = make_manager()
    parent = start(kv, list(range(10)))
    children = [kv.fork(parent, 10) for _ in range(3)]
    kv.check()
    assert kv.pool.num_used == 3
    assert kv.pool.num_shared == 3
    tail = parent.tables[0][2]
    copies = []
    for blocks in (parent, *children):
        growth = kv.allocate_slots(blocks, 10, 11)
        assert growth is not None
        copies += growth.copies
        kv.check()
    assert [source for source, _ in copies] == [tail] * 3
    assert children[-1].tables[0][2] == tail, "the last owner keeps the block"
    assert kv.allocate_slots(parent, 11, 12).copies == []  # type: ignore[union-attr]


def test_full_blocks_are_never_copied() -> None:
    kv = make_manager()
    parent = start(kv, list(range(8)))
    child = kv.fork(parent, 8)
    growth = kv.allocate_slots(child, 8, 9)
    assert growth is not None
    assert not growth.copies
    assert child.tables[0][:2] == parent.tables[0]


def test_copy_on_write_counts_as_an_allocation() -> None:
    kv = make_manager(num_blocks=3)
    parent = start(kv, list(range(10)))
    child = kv.fork(parent, 10)
    assert kv.allocate_slots(child, 10, 11) is None, "no block is free for the copy"
    kv.free(parent)
    growth = kv.allocate_slots(child, 10, 11)
    assert growth is not None
    assert not growth.copies


def test_prefix_hits_are_whole_blocks_and_never_the_last_token() -> None:
    kv = make_manager()
    kv.free(start(kv, list(range(12))))
    for tokens, expected in [
        (list(range(12)), 8),
        (list(range(13)), 12),
        ([*range(7), 99, 8], 4),
        ([99, *range(1, 12)], 0),
        ([0, 1, 2], 0),
    ]:
        chain = kv.new_chain("")
        assert kv.match_prefix(chain, tokens, len(tokens) - 1) == expected


def test_the_same_tokens_behind_another_prefix_are_no_hit() -> None:
    kv = make_manager()
    kv.free(start(kv, [1, 2, 3, 4, 5, 6, 7, 8]))
    chain = kv.new_chain("")
    assert kv.match_prefix(chain, [9, 2, 3, 4, 5, 6, 7, 8, 0], 8) == 0


def test_salts_separate_tenants() -> None:
    kv = make_manager()
    kv.free(start(kv, list(range(9)), salt="a"))
    assert kv.match_prefix(kv.new_chain("a"), list(range(9)), 8) == 8
    assert kv.match_prefix(kv.new_chain("b"), list(range(9)), 8) == 0
    assert kv.match_prefix(kv.new_chain(""), list(range(9)), 8) == 0


def test_a_hit_takes_blocks_back_from_the_evictable_ones() -> None:
    kv = make_manager(num_blocks=4)
    kv.free(start(kv, list(range(16))))
    assert kv.pool.num_evictable == 4
    chain = kv.new_chain("")
    hit = kv.match_prefix(chain, list(range(16)), 15)
    assert kv.room_after_match(chain, hit) == (1, 3)
    blocks = kv.allocate_prefix(chain, hit)
    assert kv.pool.num_evictable == 1
    kv.free(blocks)
    kv.check()


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    kv = make_manager(num_blocks=4)
    kv.free(start(kv, list(range(16))))
    kv.free(start(kv, [50, 51, 52, 53, 54]))
    assert kv.pool.num_evictions == 2
    assert kv.match_prefix(kv.new_chain(""), list(range(17)), 16) == 8


def test_equal_blocks_computed_twice_are_indexed_once() -> None:
    kv = make_manager()
    first = start(kv, list(range(4)))
    chain = kv.new_chain("")
    second = kv.allocate_prefix(chain, 0)
    assert kv.allocate_slots(second, 0, 4) is not None
    kv.cache_blocks(second, list(range(4)), 4)
    kv.check()
    kv.free(second)
    assert kv.pool.num_evictable == 0, "the duplicate has no content of its own"
    kv.free(first)
    assert kv.pool.num_evictable == 1


def test_without_caching_nothing_is_kept() -> None:
    kv = make_manager(caching=False)
    kv.free(start(kv, list(range(12))))
    assert kv.pool.num_evictable == 0
    assert kv.match_prefix(kv.new_chain(""), list(range(12)), 11) == 0


def test_blocks_outside_the_window_are_given_back() -> None:
    kv = make_manager((WINDOW,))
    blocks = start(kv, list(range(16)))
    assert kv.allocate_slots(blocks, 16, 17) is not None
    # The query at 16 reads 11 .. 16: blocks 2, 3 and 4.
    assert blocks.tables[0][:2] == [NULL_BLOCK, NULL_BLOCK]
    assert kv.pool.num_used == 3
    kv.check()
    kv.free(blocks)
    assert kv.pool.num_used == 0


def test_a_mixed_model_releases_only_what_slides() -> None:
    kv = make_manager((FULL, WINDOW))
    blocks = start(kv, list(range(16)))
    assert kv.allocate_slots(blocks, 16, 17) is not None
    assert NULL_BLOCK not in blocks.tables[0]
    assert blocks.tables[1].count(NULL_BLOCK) == 2


def test_a_hit_in_a_mixed_model_needs_the_window_of_the_sliding_layers() -> None:
    kv = make_manager((FULL, WINDOW), num_blocks=40)
    tokens = list(range(32))
    blocks = kv.allocate_prefix(kv.new_chain(""), 0)
    for begin in range(0, 32, 8):
        assert kv.allocate_slots(blocks, begin, begin + 8) is not None
        kv.cache_blocks(blocks, tokens, begin + 8)
    kv.free(blocks)
    chain = kv.new_chain("")
    assert kv.match_prefix(chain, [*tokens, 5], 32) == 32
    hit = kv.allocate_prefix(chain, 32)
    assert hit.tables[1][:6] == [NULL_BLOCK] * 6
    kv.check()


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("max_chunk", [1, 3, 8])
def test_the_bound_on_blocks_of_a_window_holds(num_tokens: int, max_chunk: int) -> None:
    kv = make_manager((WINDOW,), num_blocks=30)
    blocks = kv.allocate_prefix(kv.new_chain(""), 0)
    most = 0
    for begin in range(0, num_tokens, max_chunk):
        end = min(begin + max_chunk, num_tokens)
        assert kv.allocate_slots(blocks, begin, end) is not None
        most = max(most, kv.pool.num_used)
        kv.cache_blocks(blocks, list(range(num_tokens)), end)
    assert most <= kv.most_blocks(num_tokens, max_chunk)


def test_a_bound_is_no_larger_than_it_must_be() -> None:
    """A step of c tokens reads and writes 5 + c positions, which may start in the last slot of a block of four."""
    kv = make_manager((WINDOW,))
    assert kv.most_blocks(100, 1) == 3
    assert kv.most_blocks(100, 4) == 3
    assert kv.most_blocks(100, 5) == 4
    assert kv.most_blocks(8, 100) == 2, "never more than the sequence has"
    assert make_manager((FULL, WINDOW)).most_blocks(100, 1) == 25 + 3


def test_a_block_leaves_the_window_with_its_last_token() -> None:
    """The query at position p reads p - 5 .. p: block 0 (0 .. 3) up to p = 8, not at 9."""
    full, window = Coordinator(group_layers((FULL, WINDOW), 4)[0]).managers
    assert [window.first_needed_block(position) for position in (0, 5, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2]
    assert [full.first_needed_block(position) for position in (0, 9, 100)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        ({0, 1, 2, 3, 4, 5}, 6),
        ({4, 5}, 6),  # the next query, at 24, reads from 19 on
        ({3, 4}, 5),
        ({1, 2, 4}, 3),  # block 3 is missing: the longest hit ends before it
        ({0, 1, 3, 5}, 2),
        ({0}, 1),
        ({1, 3, 5}, 0),
        (set(), 0),
    ],
)
def test_the_longest_hit_of_a_window(cached: set[int], expected: int) -> None:
    index, hashes = PrefixIndex(num_blocks=16), [bytes([block]) for block in range(6)]
    for block in cached:
        index.insert(hashes[block], 10 + block)
    groups = Coordinator(group_layers((WINDOW,), 4)[0])
    assert groups.agreed_hit([index], [b"root", *hashes], 24) == 4 * expected
    (table,) = groups.hit_tables([index], [b"root", *hashes], 4 * expected)
    assert table == [10 + block if block >= expected - 2 else NULL_BLOCK for block in range(expected)]


def test_groups_shorten_each_others_hits_until_they_agree() -> None:
    """Six blocks suit the first group and five the second, but five do not suit the first: it has no block 3."""
    kv = make_manager((WINDOW, dataclasses.replace(WINDOW, window=10)), num_blocks=40)
    chain = kv.new_chain("")
    tokens = list(range(24))
    chain.extend(tokens, 6)
    for index, cached in zip(kv._indexes, ((0, 1, 4, 5), (0, 1, 2, 3, 4)), strict=True):
        for block in cached:
            index.insert(chain.block_hash(block), 1 + block)
    assert kv.match_prefix(chain, tokens, 24) == 8


@pytest.mark.parametrize(("num_blocks", "num_offered"), [(20, 4), (5, 2)])
def test_a_block_that_left_the_window_waits_for_its_commit_while_there_is_room(
    num_blocks: int, num_offered: int
) -> None:
    """Planning ahead, the next step needs it no longer before the result of the step that filled it has come."""
    kv = make_manager((WINDOW,), num_blocks=num_blocks)
    tokens = list(range(24))
    blocks = kv.allocate_prefix(kv.new_chain(""), 0)
    assert kv.allocate_slots(blocks, 0, 16) is not None
    assert kv.allocate_slots(blocks, 16, 21) is not None
    kv.cache_blocks(blocks, tokens, 16)
    kv.check()
    assert len(kv._indexes[0].check()) == num_offered
    assert kv.allocate_slots(blocks, 21, 24) is not None
    assert kv.pool.num_used == 2


def test_a_child_offers_what_its_parent_could_not() -> None:
    """The parent may end between the fork and the result of the step that computed the prompt."""
    kv = make_manager()
    tokens = list(range(9))
    parent = kv.allocate_prefix(kv.new_chain(""), 0)
    assert kv.allocate_slots(parent, 0, 9) is not None
    child = kv.fork(parent, 9)
    kv.free(parent)
    kv.cache_blocks(child, tokens, 9)
    kv.free(child)
    assert kv.match_prefix(kv.new_chain(""), tokens, 8) == 8


def test_the_blocks_of_a_hit_are_not_offered_again() -> None:
    kv = make_manager()
    kv.free(start(kv, list(range(12))))
    assert start(kv, list(range(13))).num_committed == 3
    chain = kv.new_chain("")
    assert kv.allocate_prefix(chain, kv.match_prefix(chain, list(range(13)), 12)).num_committed == 3


def test_an_index_keeps_the_first_block_of_a_content_and_the_first_content_of_a_block() -> None:
    index = PrefixIndex(num_blocks=3)
    index.insert(b"a", 1)
    index.insert(b"a", 2)
    index.insert(b"b", 1)
    assert index.check() == {1}
    assert (index.find(b"a"), index.find(b"b")) == (1, None)
    index.remove(1)
    assert len(index) == 0
    assert 1 not in index


def test_check_catches_a_lost_count_a_double_use_and_a_leak() -> None:
    for damage in (
        lambda kv, blocks: kv.pool.ref_counts.__setitem__(blocks.tables[0][0], 2),
        lambda kv, blocks: blocks.tables[0].__setitem__(1, blocks.tables[0][0]),
        lambda kv, blocks: kv.pool._free.append(blocks.tables[0][0]),
        lambda kv, blocks: blocks.tables[0].pop(),
        lambda kv, blocks: kv.pool.ref_counts.__setitem__(kv.pool._free[0], 1),
        lambda kv, blocks: kv._indexes[0].insert(b"nothing", NULL_BLOCK),
        lambda kv, blocks: kv._indexes[0].insert(b"nothing", kv.pool._free[0]),
    ):
        kv = make_manager()
        blocks = start(kv, list(range(8)))
        kv.check()
        damage(kv, blocks)
        with pytest.raises(AssertionError):
            kv.check()
