"""Attention of tokens that see later ones (images), against float64, and its bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from quire.kernels.arguments import LayerAttention
from tests.kernels.cpu.attention_pool import BF16_ISAS, WAYS, History, NativePool, Setting
from tests.long import one_in

LENGTH = 330
IMAGES = ((3, 20), (70, 71), (100, 230), (230, 262), (300, 330))
BORDERS = ((20, 100, 330), (3, 71, 99, 262, 263), (50, 70, 230))
"""Ends of chunks, none inside an image."""
LAYERS = {
    "grouped": LayerAttention(layer=0, num_heads=6, num_kv_heads=2, head_dim=64, scale=0.125),
    "window": LayerAttention(layer=0, num_heads=2, num_kv_heads=1, head_dim=80, scale=0.11, window=90, soft_cap=3.0),
}


def attended(pool: NativePool, history: History, borders: Sequence[int] = ()) -> torch.Tensor:
    """Of all tokens of sequence 0, in chunks with these ends."""
    parts = []
    for end in sorted({*borders, len(history.q)}):
        parts += pool.step([history], [(0, end - pool.computed[0])])
    return torch.cat(parts)


def made(name: str, setting: Setting, lengths: Sequence[int] = (LENGTH,)) -> NativePool:
    pool = NativePool(LAYERS[name], lengths, setting)
    pool.images = IMAGES
    return pool


@pytest.mark.parametrize(("isa", "cache", "name"), one_in(3, WAYS, LAYERS))
def test_equals_dense_attention_and_has_the_same_bits_in_all_chunks(isa: str, cache: str, name: str) -> None:
    history = History.random(LENGTH, LAYERS[name], seed=4)
    pool = made(name, Setting(isa, 1, cache))
    expected = attended(pool, history)
    pool.check(expected, 0, history.q, 0, 3e-4)
    for threads, block_size, borders in zip((2, 1, 8), (8, 128, 1), BORDERS, strict=True):
        other = made(name, Setting(isa, threads, cache, block_size, seed=9))
        assert torch.equal(attended(other, history, borders), expected), (threads, block_size)


@pytest.mark.parametrize(
    "way", [*(way for way in WAYS if way[1] == "float32"), *((isa, "bfloat16") for isa in BF16_ISAS)]
)
def test_text_has_the_bits_that_it_has_without_the_column(way: tuple[str, str]) -> None:
    """What is before the first image, and the same in a step beside images."""
    history, other = (History.random(LENGTH, LAYERS["grouped"], seed=seed) for seed in (4, 5))
    plain, pool = (
        NativePool(LAYERS["grouped"], [LENGTH], Setting(*_of(way))),
        made("grouped", Setting(*_of(way)), [LENGTH] * 2),
    )
    (expected,) = plain.step([history], [(0, 3)])
    first, _ = pool.step([history, other], [(0, 3), (1, 262)])
    assert torch.equal(first, expected)
    assert not torch.equal(attended(plain, history), attended(pool, history)), "images see ahead"


def _of(way: tuple[str, str]) -> tuple[str, int, str]:
    return way[0], 2, way[1]


@pytest.mark.parametrize("change", [(5, 4), (5, 6), (2, 9), (9, 10)])
def test_positions_that_cannot_be_seen_are_refused(change: tuple[int, int]) -> None:
    """Before a token's own, falling, and beyond the step."""
    pool = made("grouped", Setting(WAYS[0][0]))
    pool.images = [(4, 8)]
    batch = pool.batch([(0, 10)])
    assert batch.last_seen is not None
    batch.last_seen[change[0]] = change[1]
    with pytest.raises(ValueError, match="cannot see up to"):
        pool.plans.set(batch)
