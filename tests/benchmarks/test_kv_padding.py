"""The layouts of published models waste little."""

from __future__ import annotations

import pytest

from benchmarks.kv_padding import LENGTHS, MODELS, padding_at
from quire.kv_cache.layout import group_layers


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block_size", [16, 32])
def test_at_most_twelve_per_cent_of_the_blocks_are_padding(name: str, block_size: int) -> None:
    for num_tokens in LENGTHS:
        assert 0 <= padding_at(MODELS[name], num_tokens, block_size) <= 0.12


def test_every_layer_is_in_one_group_and_blocks_are_multiples_of_the_option() -> None:
    for specs in MODELS.values():
        groups, layers_per_group = group_layers(specs, 16)
        assert sorted(layer for group in groups for layer in group.layers) == list(range(len(specs)))
        assert all(group.block_size % 16 == 0 for group in groups)
        assert all(len(group.layers) <= layers_per_group for group in groups)


def test_models_whose_layers_keep_as_many_bytes_have_the_block_size_of_the_option() -> None:
    for name in ("gemma-2-9b", "gemma-3-27b", "gpt-oss-20b", "llama-4-scout", "deepseek-v3"):
        assert {group.block_size for group in group_layers(MODELS[name], 16)[0]} == {16}
