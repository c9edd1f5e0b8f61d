"""Paged attention in Triton against float64, and its bits in batch-invariant mode."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.arguments import CacheScale, LayerAttention
from quire.kernels.triton.attention_tiles import SplitPlan, Tiles
from tests.kernels.triton.attention_cases import Case, assert_equals_reference
from tests.long import one_in

SEQUENCES = [(37, 2), (20, 11), (33, 1), (16, 0)]
"""Tokens over a context, a chunk longer than a tile, a decode, one that is not scheduled."""


def layer(heads: int = 2, kv_heads: int = 1, dim: int = 16, **rest: Any) -> LayerAttention:
    return LayerAttention(layer=0, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5, **rest)


CASES = {
    "two-key-heads": partial(Case, layer(4, 2), SEQUENCES),
    "multi-head": partial(Case, layer(2, 2), SEQUENCES, block_size=8),
    "group-of-3": partial(Case, layer(3, 1), SEQUENCES),
    "group-of-16": partial(Case, layer(16, 1), SEQUENCES),
    "head-80": partial(Case, layer(2, 1, 80), SEQUENCES, block_size=32),
    "head-64-bfloat16": partial(Case, layer(4, 1, 64), SEQUENCES, dtype=torch.bfloat16),
    "head-128-float16": partial(Case, layer(2, 1, 128), SEQUENCES, dtype=torch.float16),
    "head-256": partial(Case, layer(1, 1, 256), SEQUENCES, block_size=64),
    "other-pages": partial(Case, layer(), SEQUENCES, dtype=torch.bfloat16, page_dtype=torch.float32),
    "float8-pages": partial(Case, layer(2, 1, 32), SEQUENCES, dtype=torch.bfloat16, page_dtype=torch.uint8),
    "float8-numbers": partial(Case, layer(3, 1, 80), SEQUENCES, dtype=torch.bfloat16, page_dtype=torch.float8_e4m3fn),
    "float8-scales": partial(
        Case, layer(2, 1, 32, soft_cap=0.7, cache_scale=CacheScale(0.4, 2.5)), SEQUENCES, page_dtype=torch.uint8
    ),
    "block-128": partial(Case, layer(), SEQUENCES, block_size=128),
    "block-4": partial(Case, layer(), SEQUENCES, block_size=4),
    "window": partial(Case, layer(window=10), SEQUENCES),
    "window-of-1": partial(Case, layer(window=1), SEQUENCES, block_size=8),
    "soft-cap": partial(Case, layer(soft_cap=0.7), SEQUENCES),
    "sinks": partial(Case, layer(), SEQUENCES, sinks=torch.tensor([0.5, -1.0])),
    "images": partial(Case, layer(4, 2), SEQUENCES, images={0: [(0, 2)], 1: [(1, 4), (4, 11)]}),
    "images-window": partial(Case, layer(window=5), [(40, 40), (9, 1)], images={0: [(3, 23), (30, 40)]}),
    "everything": partial(Case, layer(window=21, soft_cap=1.5), SEQUENCES, sinks=torch.tensor([2.0, -40.0])),
}


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_equals_float64(name: str, device: torch.device) -> None:
    """By the split kernel with two programs a sequence: all but the chunk of 11 tokens, which is not its."""
    case = CASES[name](device=device)
    assert_equals_reference(case, case.varlen(Tiles(16, 16, 4, 1)))
    if case.images:
        return  # the varlen kernel's alone
    out = case.split(SplitPlan(Tiles(32, 16, 4, 1), tokens=2, num_programs=2, capacity=2, min_keys=16))
    assert_equals_reference(case, out, most_tokens=2)


def test_queries_of_any_size_over_float8_pages(device: torch.device) -> None:
    """Products with e4m3 numbers are of float16: queries beyond it, far below it, and zeros lose nothing."""
    case = Case(layer(2, 1, 32), [(40, 4)], dtype=torch.bfloat16, page_dtype=torch.uint8, device=device)
    case.qkv[:4] *= torch.tensor([1e6, 1e-6, 0.0, 300.0], device=device).bfloat16()[:, None]
    assert_equals_reference(case, case.varlen(Tiles(16, 16, 4, 1)))


def test_the_two_kernels_share_a_batch(device: torch.device) -> None:
    case = CASES["window"](device=device)
    out = case.varlen(Tiles(16, 16, 4, 1), skipped=2)
    split = case.split(SplitPlan(Tiles(16, 16, 4, 1), tokens=2, num_programs=2, capacity=2, min_keys=16))
    assert (out.isnan() | split.isnan()).all()
    assert_equals_reference(case, torch.where(out.isnan(), split, out))


def test_short_splits_are_not_cut(device: torch.device) -> None:
    """min_keys: a sequence of 33 tokens stays whole; nothing of its is left for the merging kernel to read."""
    case = Case(layer(), [(33, 1), (70, 1)], device=device)
    out = case.split(SplitPlan(Tiles(16, 16, 4, 1), tokens=1, num_programs=5, capacity=5, min_keys=48))
    assert_equals_reference(case, out)


def test_many_splits(device: torch.device) -> None:
    """A program merges one head, all splits at once; of sequences with as many splits as there is room for, with fewer,
    and with one, which is not cut."""
    sequences = [(171, 2), (70, 1), (16, 1), (9, 5)]
    case = Case(layer(3, 1, window=140), sequences, sinks=torch.tensor([0.5, -1.0, 3.0]), device=device)
    out = case.split(SplitPlan(Tiles(16, 16, 4, 1), tokens=2, num_programs=10, capacity=10, min_keys=16))
    assert_equals_reference(case, out, most_tokens=2)


@settings(max_examples=6)
@given(
    sequences=st.lists(
        st.integers(1, 70).flatmap(lambda length: st.tuples(st.just(length), st.integers(0, min(length, 9)))),
        min_size=1,
        max_size=3,
    ).filter(lambda sequences: any(new for _, new in sequences)),
    group=st.integers(1, 5),
    block_size=st.sampled_from([8, 16, 32]),
    window=st.none() | st.integers(1, 40),
    fixed_keys=st.sampled_from([0, 32]),
    seed=st.integers(0, 99),
)
def test_shapes(
    device: torch.device,
    sequences: list[tuple[int, int]],
    group: int,
    block_size: int,
    window: int | None,
    fixed_keys: int,
    seed: int,
) -> None:
    case = Case(layer(group, 1, window=window), sequences, block_size=block_size, device=device, seed=seed)
    tiles = Tiles(16, 16, 4, 1, fixed_keys)
    varlen = case.varlen(tiles)
    assert_equals_reference(case, varlen)
    tokens = 1 if fixed_keys else 16 // group
    split = case.split(SplitPlan(tiles, tokens, num_programs=2, capacity=4 if fixed_keys else 2, min_keys=32))
    assert_equals_reference(case, split, most_tokens=tokens)
    if fixed_keys:
        assert torch.equal(split[~split.isnan()], varlen[~split.isnan()])


@pytest.mark.parametrize("name", ["block-4", "everything", "head-64-bfloat16"])
def test_same_bits_however_a_row_comes_about(name: str, device: torch.device) -> None:
    """Batch-invariant mode: each token of a sequence, computed in chunks of any size that begin anywhere, or as a
    decode by either kernel."""
    model, length, fixed = CASES[name](), 71, Tiles(32, 16, 4, 1, 32)
    whole = Case(model.layer, [(length, length)], dtype=model.dtype, sinks=model.sinks, device=device)
    out = whole.varlen(fixed)
    assert_equals_reference(whole, out)
    expected = out[:length]
    for start, new in ((13, 9), (66, 5), (32, 1), (70, 1)):
        part = _part_of(whole, start + new, new)
        assert torch.equal(part.varlen(fixed)[:new], expected[start : start + new])
        if new == 1:
            for num_programs in (1, 2):
                plan = SplitPlan(fixed, 1, num_programs, capacity=3, min_keys=32)
                assert torch.equal(part.split(plan)[:1], expected[start : start + 1])


def test_same_bits_however_an_image_comes_about(device: torch.device) -> None:
    """In chunks that begin before or at images, whatever shares their tiles; text has the bits that it has alone."""
    fixed, images = Tiles(32, 16, 4, 1, 32), [(5, 21), (40, 70)]
    whole = Case(layer(2, 1, window=50), [(71, 71)], device=device, images={0: images})
    out = whole.varlen(fixed)
    assert_equals_reference(whole, out)
    for start, end in ((3, 21), (5, 33), (40, 70), (21, 40)):
        part = _part_of(whole, end, end - start)
        part.images = {0: [(a - start, b - start) for a, b in images if start <= a and b <= end]}
        part.batch = replace(part.batch, last_seen=part._last_seen().to(device))
        assert torch.equal(part.varlen(fixed)[: end - start], out[start:end])
    alone = _part_of(whole, 40, 19)
    assert torch.equal(alone.varlen(fixed)[:19], out[21:40])


def test_same_bits_alone_and_among_others(device: torch.device) -> None:
    """Also where sequences fill one tile differently, and wherever the tables' rows lie."""
    fixed = Tiles(16, 16, 4, 1, 32)
    together = Case(layer(window=40), SEQUENCES, device=device)
    out, start = together.varlen(fixed), 0
    for index, (length, new) in enumerate(SEQUENCES):
        alone = Case(layer(window=40), [(length, new)] if new else [(length, 1)], device=device)
        alone.pages = together.pages
        alone.batch.block_tables[0][alone.batch.rows[0]] = 10**6
        table = together.batch.block_tables[0][together.batch.rows[index]]
        alone.batch.block_tables[0][alone.batch.rows[0], : -(-length // 16)] = table[: -(-length // 16)]
        alone.qkv[:new] = together.qkv[start : start + new]
        if new:
            assert torch.equal(alone.varlen(fixed)[:new], out[start : start + new])
        start += new


def _part_of(whole: Case, length: int, new: int) -> Case:
    """The last `new` of the first `length` tokens of a case of one sequence; the keys behind them are gone."""
    part = Case(whole.layer, [(length, new)], dtype=whole.dtype, sinks=whole.sinks, device=whole.device)
    size, window = part.block_size, part.layer.window or length
    for position in range(max(0, length - new - window + 1), length):
        source = whole.batch.block_tables[0][whole.batch.rows[0], position // size]
        target = part.batch.block_tables[0][part.batch.rows[0], position // size]
        part.pages[target, :, position % size] = whole.pages[source, :, position % size]
    part.qkv[:new] = whole.qkv[length - new : length]
    return part
