"""The layouts of published models waste little. `quire plan MODEL --gpu GPU` prints them."""

from __future__ import annotations

import pytest

from quire.config.parallel import ParallelConfig
from quire.kv_cache.coordinator import padding
from quire.kv_cache.layout import block_bytes, group_layers
from quire.simulator.memory import device_specs
from quire.simulator.shape import built_in, find_shape

EQUAL = ("gemma-2-9b", "gemma-3-27b", "gpt-oss-120b", "llama-4-scout", "deepseek-v3", "llama-3-8b")
STATES = ("qwen3-next-80b-a3b", "qwen3.5-27b", "kimi-linear-48b-a3b")


@pytest.mark.parametrize("name", built_in())
@pytest.mark.parametrize("tp", [1, 8])
def test_at_most_twelve_per_cent_of_the_blocks_are_padding(name: str, tp: int) -> None:
    specs = device_specs(find_shape(name), "bfloat16", ParallelConfig(tp=tp))
    for block_size in (16, 32):
        groups, layers_per_group = group_layers(specs, block_size)
        assert sorted(layer for group in groups for layer in group.layers) == list(range(len(specs)))
        assert all(group.block_size % block_size == 0 for group in groups)
        for num_tokens in (1, 1024, 8192, 131_072):
            assert 0 <= padding(groups, block_bytes(groups, layers_per_group), num_tokens) <= 0.12


@pytest.mark.parametrize("name", EQUAL)
def test_layers_that_keep_as_many_bytes_have_the_block_size_of_the_option(name: str) -> None:
    groups, _ = group_layers(device_specs(find_shape(name), "bfloat16", ParallelConfig()), 16)
    assert {group.block_size for group in groups} == {16}


@pytest.mark.parametrize("name", STATES)
def test_snapshots_of_states_lie_on_boundaries_of_the_other_groups(name: str) -> None:
    groups, _ = group_layers(device_specs(find_shape(name), "bfloat16", ParallelConfig()), 16)
    intervals = {group.block_size for group in groups if group.spec.kind == "state"}
    others = {group.block_size for group in groups if group.spec.kind != "state"}
    assert intervals
    assert others
    assert all(interval >= 1024 and interval % size == 0 for interval in intervals for size in others)
