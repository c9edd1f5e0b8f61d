"""The blocks that live sequences are about to cache, and the look-ups that find them."""

from __future__ import annotations

import pytest

from quire.kv_cache.block_hash import HashChain
from quire.kv_cache.block_table import BlockTable
from quire.kv_cache.manager import KVCacheManager
from tests.kv_cache.test_manager import FULL, WINDOW, make_manager

TOKENS = list(range(23))
"""Five full blocks of four tokens, the last of which never counts as a hit of a prompt that ends with it."""


def begin(kv: KVCacheManager, token_ids: list[int], salt: str = "") -> BlockTable:
    chain = kv.new_chain(salt)
    blocks = kv.allocate_prefix(chain, kv.match_prefix(chain, token_ids, len(token_ids) - 1))
    kv.check()
    return blocks


def compute(kv: KVCacheManager, blocks: BlockTable, token_ids: list[int], start: int, end: int) -> None:
    assert kv.allocate_slots(blocks, start, end) is not None
    kv.cache_blocks(blocks, token_ids, end)
    kv.check()


def find(kv: KVCacheManager, token_ids: list[int], salt: str = "") -> tuple[BlockTable, int] | None:
    chain = kv.new_chain(salt)
    return kv.find_pending(chain, kv.match_prefix(chain, token_ids, len(token_ids) - 1), len(token_ids) - 1)


@pytest.mark.parametrize("specs", [(FULL,), (WINDOW,), (FULL, WINDOW)])
def test_the_block_behind_a_hit_is_found_while_a_sequence_computes_it(specs) -> None:  # type: ignore[no-untyped-def]
    kv = make_manager(specs, num_blocks=40)
    assert find(kv, TOKENS) is None
    blocks = begin(kv, TOKENS)
    assert find(kv, TOKENS) == (blocks, 5)
    for end in (4, 11, 16):
        compute(kv, blocks, TOKENS, blocks.capacity, end)
        assert find(kv, TOKENS) == (blocks, 5)
    compute(kv, blocks, TOKENS, 16, 23)
    assert find(kv, TOKENS) is None, "all blocks are there"
    assert blocks.pending_hash is None
    kv.free(blocks)
    kv.check()


@pytest.mark.parametrize(
    ("token_ids", "shared"),
    [(TOKENS, 5), (TOKENS[:20], 4), ([*TOKENS[:9], 99, 99, 99, 99], 2), ([*TOKENS[:4], 99], 1)],
)
def test_how_much_is_shared(token_ids: list[int], shared: int) -> None:
    kv = make_manager()
    blocks = begin(kv, TOKENS)
    assert find(kv, token_ids) == (blocks, shared)


@pytest.mark.parametrize("token_ids", [[99, *TOKENS[1:]], TOKENS[:4], [*TOKENS[:3], 99, 99]])
def test_no_pending_block_for_a_prefix_that_differs_or_fills_no_block(token_ids: list[int]) -> None:
    kv = make_manager()
    begin(kv, TOKENS)
    assert find(kv, token_ids) is None


def test_pending_blocks_are_kept_apart_by_salt_and_need_caching() -> None:
    kv = make_manager()
    begin(kv, TOKENS, salt="a")
    assert find(kv, TOKENS, salt="b") is None
    assert find(kv, TOKENS, salt="a") is not None
    kv = make_manager(caching=False)
    assert begin(kv, TOKENS).pending_hash is None
    assert find(kv, TOKENS) is None


def test_a_sequence_computes_until_it_has_committed_or_is_gone() -> None:
    kv = make_manager()
    blocks = begin(kv, TOKENS)
    assert kv.is_pending_in(blocks, 1)
    compute(kv, blocks, TOKENS, 0, 8)
    assert [kv.is_pending_in(blocks, count) for count in (1, 2, 3)] == [False, False, True]
    kv.free(blocks)
    assert not kv.is_pending_in(blocks, 3)
    assert find(kv, TOKENS) is None
    kv.check()


def test_of_two_that_compute_the_same_the_first_is_found_and_the_second_takes_its_place_later() -> None:
    kv = make_manager()
    first, second = begin(kv, TOKENS), begin(kv, TOKENS)
    assert find(kv, TOKENS) == (first, 5)
    kv.free(second)
    assert find(kv, TOKENS) == (first, 5), "the second could not remove the pending block of the first"
    second = begin(kv, TOKENS)
    kv.free(first)
    assert find(kv, TOKENS) is None
    compute(kv, second, TOKENS, 0, 8)
    assert find(kv, TOKENS) == (second, 5)


def test_a_reset_removes_all_pending_blocks() -> None:
    """The blocks to come could never be hit without those that were forgotten."""
    kv = make_manager()
    blocks = begin(kv, TOKENS)
    compute(kv, blocks, TOKENS, 0, 8)
    kv.reset_prefix_cache()
    kv.check()
    assert not kv.is_pending_in(blocks, 5)
    compute(kv, blocks, TOKENS, 8, 16)
    assert find(kv, TOKENS) is None


def test_check_notices_a_pending_block_of_a_sequence_that_is_gone() -> None:
    kv = make_manager()
    blocks = begin(kv, TOKENS)
    pending_hash = blocks.pending_hash
    blocks.pending_hash = None
    kv.free(blocks)
    blocks.pending_hash = pending_hash
    with pytest.raises(AssertionError, match="that ended"):
        kv.check()


@pytest.mark.parametrize("shared", range(7))
def test_leading_blocks_that_two_chains_share(shared: int) -> None:
    mine, other = HashChain(2, ""), HashChain(2, "")
    mine.extend(list(range(12)), 6)
    other.extend([*range(2 * shared), *[99] * (14 - 2 * shared)], 7)
    assert (mine.num_blocks, other.num_blocks) == (6, 7)
    assert mine.num_shared(other) == other.num_shared(mine) == shared
    assert mine.num_shared(HashChain(2, "")) == 0
