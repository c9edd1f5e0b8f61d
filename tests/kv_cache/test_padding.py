"""The layouts of published models waste little. `quire plan --kv-waste` prints what."""

from __future__ import annotations

import pytest

from quire.cli.kv_waste import hybrid_models, kv_waste
from quire.config.cache import SNAPSHOT_INTERVAL
from quire.config.parallel import ParallelConfig
from quire.kv_cache.layout import group_layers
from quire.simulator.memory import device_specs
from quire.simulator.shape import built_in, find_shape

EQUAL = (
    "gemma-2-9b",
    "gemma-3-27b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "llama-4-scout",
    "deepseek-v3",
    "deepseek-v3.2",
    "kimi-k2",
    "llama-3-8b",
)
STATES = ("qwen3-next-80b-a3b", "qwen3.5-27b", "qwen3.5-35b-a3b", "kimi-linear-48b-a3b")


@pytest.mark.parametrize("tp", [1, 8])
def test_at_most_twelve_per_cent_of_the_pool_are_padding(tp: int) -> None:
    """Of every built-in shape: the whole pool is blocks of sequences of one length."""
    for block_size in (16, 32):
        for waste in kv_waste(list(built_in()), "bfloat16", ParallelConfig(tp=tp), block_size, SNAPSHOT_INTERVAL):
            assert all(0 <= share <= 0.12 for share in waste.shares), waste.model
            num_layers = len(find_shape(waste.model).layers)
            assert sorted(layer for group in waste.groups for layer in group.layers) == list(range(num_layers))
            assert all(group.block_size % block_size == 0 for group in waste.groups)


def test_the_table_has_the_models_that_mix_kinds() -> None:
    assert {*EQUAL, *STATES} - {"llama-3-8b"} <= set(hybrid_models())


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
