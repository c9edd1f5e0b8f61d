"""Regions and what the paper counts of them, by hand."""

from __future__ import annotations

import pytest

from benchmarks.baselines.regions import Regions, SlotAccounts
from benchmarks.baselines.reservation import reserve_max, reserve_oracle, reserve_pow2
from quire.errors import ConfigError
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec, LayerSpec, SlidingWindowSpec

FULL = AttentionSpec(num_kv_heads=1, key_dim=8, value_dim=8, dtype_bytes=4)
WINDOW = SlidingWindowSpec(num_kv_heads=1, key_dim=8, value_dim=8, dtype_bytes=4, window=8)


def layout(num_blocks: int, *specs: LayerSpec, block_size: int = 4) -> KVCacheLayout:
    groups, layers_per_group = group_layers(specs or (FULL,), block_size)
    return KVCacheLayout(block_size, num_blocks + 1, groups, layers_per_group)


def test_reservations() -> None:
    assert reserve_max(10, 25, 2048) == 2048
    assert reserve_pow2(10, 25, 2048) == 10 + 32
    assert reserve_pow2(10, 32, 2048) == 10 + 32
    assert reserve_pow2(10, 1, 2048) == 11
    assert reserve_pow2(1000, 1030, 2048) == 2048
    assert reserve_oracle(10, 25, 2048) == 35


def test_a_region_is_consecutive_blocks_and_never_the_null_block() -> None:
    regions = Regions(layout(8))
    assert regions.reserve([7], 10, 9)
    assert regions.blocks(7).tables == [[1, 2, 3]]
    assert regions.blocks(7).capacity == 12


def test_accounts_of_the_paper() -> None:
    """A pool of 64 slots. One request of 5 + 6 tokens reserves 5 + 8, in a chunk of 16; 7 of its tokens are stored."""
    regions = Regions(layout(16))
    assert regions.reserve([1], 13, 11)
    accounts = regions.accounts({1: 7})
    assert accounts == SlotAccounts(total=64, stored=7, reserved=4, internal=2, rounding=3, free=48)
    # When it has ended while its batch goes on, nothing of it is of use.
    assert regions.accounts({}) == SlotAccounts(total=64, internal=13, rounding=3, free=48)


def test_all_regions_of_a_request_or_none() -> None:
    regions = Regions(layout(8))
    assert regions.reserve([1], 16, 16)
    assert not regions.reserve([2, 3], 9, 9)
    regions.check({1})
    assert regions.buddy.num_free == 4
    assert regions.reserve([2], 9, 9)
    regions.check({1, 2})


def test_how_many_fit_counts_the_rounding() -> None:
    """982 blocks of 16 tokens (OPT-13B in the paper): 7 times 2,048 slots; 1,025 slots take as much."""
    regions = Regions(layout(982, block_size=16))
    assert regions.num_that_fit(2048) == regions.num_that_fit(1025) == 7
    assert regions.num_that_fit(1024) == 15
    assert regions.longest == 512 * 16


def test_states_name_every_block_of_a_chunk() -> None:
    regions = Regions(layout(8))
    assert regions.reserve([1], 9, 9)
    assert regions.states() == bytes([0, 1, 1, 1, 1, 0, 0, 0, 0])


def test_sliding_windows_are_refused() -> None:
    with pytest.raises(ConfigError, match="attend to every token"):
        Regions(layout(8, FULL, WINDOW))
