"""The dealing of tokens to ranks, and blocks of several ranks that are one for the scheduler."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kv_cache.deal import Deal
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec
from quire.worker.block_tables import BlockTables, table_shapes

DEALS = [(1, 1), (2, 1), (2, 4), (3, 2), (4, 8)]


@pytest.mark.parametrize(("num_ranks", "run"), DEALS)
def test_every_token_is_on_one_rank_and_numbered_without_gaps(num_ranks: int, run: int) -> None:
    positions = np.arange(100)
    deals = [Deal(num_ranks, rank, run) for rank in range(num_ranks)]
    kept = np.stack([deal.keeps(positions) for deal in deals])
    assert (kept.sum(0) == 1).all()
    for deal, own in zip(deals, kept, strict=True):
        assert deal.kept(positions[own]).tolist() == list(range(own.sum()))
        assert deal.kept(np.arange(101)).tolist() == [0, *np.cumsum(own)]


def test_a_block_is_as_many_as_ranks_share_it() -> None:
    """Its page has room for the tokens of one."""
    spec, whole = AttentionSpec(1, 8, 8, 4, dealt_to=2), AttentionSpec(1, 8, 8, 4)
    groups, layers_per_group = group_layers([spec] * 3, 16)
    layout = KVCacheLayout(16, 9, groups, layers_per_group)
    assert [group.block_size for group in groups] == [32]
    assert layout.page_bytes == whole.page_bytes(16) == spec.page_bytes(32)
    assert (layout.sequence_block, layout.kernel_blocks(groups[0])) == (32, 1)


@pytest.mark.parametrize(("num_ranks", "run"), DEALS[1:])
def test_slots_of_two_ranks_are_the_places_of_their_own_tokens(num_ranks: int, run: int) -> None:
    groups, layers_per_group = group_layers([AttentionSpec(1, 8, 8, 4, dealt_to=num_ranks)], 8)
    layout = KVCacheLayout(8, 20, groups, layers_per_group)
    positions = np.arange(70)
    for rank in range(num_ranks):
        deal = Deal(num_ranks, rank, run)
        (shape,) = table_shapes(layout, deal)
        tables = BlockTables([shape], 1, 70)
        blocks = list(range(12, 12 - shape.width(70), -1))
        tables.append(0, [blocks])
        slots = shape.slots(tables.arrays[0], np.zeros(70, np.int64), positions)
        own = deal.keeps(positions)
        assert (slots[~own] == -1).all()
        assert slots[own].tolist() == [blocks[i // 8] * 8 + i % 8 for i in range(own.sum())]
