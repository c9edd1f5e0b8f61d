"""Routing of mixtures of experts: each row's choice, and the order of pairs by expert.
`kernels/experts.py:route` is the plain twin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.arguments import Routing
from quire.kernels.triton.runtime import blocks_of, bound, launch, narrow, next_power_of_2

PAIRS = 1024
"""Pairs that a program reads at once."""
MANY_PAIRS, PAIRS_OF_MANY = 8192, 4096
"""Pairs from which they are counted first, and pairs of a program then."""
SLICES_AT_ONCE = tl.constexpr(8)
TILES_AT_ONCE = tl.constexpr(32)
LEAST_BINS = 32
"""Bins of the smallest histogram: a warp's threads."""
COLUMNS = 1024
"""Elements of a row per program of `gate_rows`."""


@triton.jit
def _best(values, taken, index, SIZE: tl.constexpr):
    """Largest untaken value, and its index: of equal ones the lowest."""
    open_values = tl.where(taken, -float("inf"), values)
    best = tl.max(open_values, 0)
    return best, tl.min(tl.where((open_values == best) & (taken == 0), index, SIZE), 0)


@triton.jit
def _closed_groups(
    preference, outside, index, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
):  # fmt: skip
    """[BLOCK], True for experts outside the best groups. A group is worth the sum of its best experts' preferences."""
    group, number = index // (EXPERTS // GROUPS), tl.arange(0, GROUPS_BLOCK)
    worth = tl.zeros((GROUPS_BLOCK,), tl.float32)
    for each in tl.static_range(GROUPS):
        taken = outside | (group != each)
        total, at = _best(preference, taken, index, BLOCK)
        for _ in tl.static_range(1, GROUP_BEST):
            taken = taken | (index == at)
            another, at = _best(preference, taken, index, BLOCK)
            total += another
        worth = tl.where(number == each, total, worth)
    closed = outside | (index >= 0)
    chosen = number >= GROUPS
    for _ in tl.static_range(TOP_GROUPS):
        _, best = _best(worth, chosen, number, GROUPS_BLOCK)
        chosen = chosen | (number == best)
        closed = closed & (group != best)
    return closed


@triton.jit
def _route_kernel(
    logits,
    bias,
    out,
    logits_stride,
    factor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """Program (row). out: [T, 2 * TOP_K], chosen experts in ascending order, then their weights."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    outside = index >= EXPERTS
    wide = tl.load(logits + row * logits_stride + index, mask=index < EXPERTS, other=-float("inf")).to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(wide - tl.max(wide, 0))
        scores = scores / tl.sum(scores, 0)
    else:
        scores = 1.0 / (tl.exp(-wide) + 1.0)
    # Different logits can round to equal scores, so logits decide unless a bias or groups need scores.
    NEEDS_SCORES: tl.constexpr = HAS_BIAS or GROUPS > 1
    preference = scores if NEEDS_SCORES else wide
    if HAS_BIAS:
        preference += tl.load(bias + index, mask=index < EXPERTS, other=0.0)
    # Padding rows may hold anything: each row chooses TOP_K experts all the same.
    preference = tl.where(preference == preference, preference, float("inf"))
    if GROUPS > 1:
        closed = _closed_groups(
            preference, outside, index, EXPERTS, BLOCK, GROUPS, GROUPS_BLOCK, TOP_GROUPS, GROUP_BEST
        )
        preference = tl.where(closed, -float("inf"), preference)
    taken = outside
    for _ in range(TOP_K):
        _, best = _best(preference, taken, index, BLOCK)
        taken = taken | (index == best)
    chosen = taken & (index < EXPERTS)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    weights = tl.where(chosen, scores, 0.0)
    if RENORMALISE:
        weights = weights / tl.sum(weights, 0)
    to = out + row * (2 * TOP_K) + place
    tl.store(to, index.to(tl.float32), mask=chosen)
    tl.store(to + TOP_K, weights * factor, mask=chosen)


def route(routing: Routing, logits: torch.Tensor) -> torch.Tensor:
    """Choose each token's experts (`Operations.route`). logits: [T, num_experts], contiguous rows. Returns
    [T, 2 * top_k] float32."""
    assert logits.stride(1) == 1, "the elements of a row lie side by side"
    out = torch.empty(len(logits), 2 * routing.top_k, dtype=torch.float32, device=logits.device)
    if len(logits):
        launch(
            _route_kernel,
            (len(logits),),
            logits,
            routing.bias,
            out,
            logits.stride(0),
            routing.factor,
            EXPERTS=routing.num_experts,
            BLOCK=next_power_of_2(routing.num_experts),
            TOP_K=routing.top_k,
            SOFTMAX=routing.scoring == "softmax",
            RENORMALISE=routing.renormalise,
            HAS_BIAS=routing.bias is not None,
            GROUPS=routing.num_groups,
            GROUPS_BLOCK=next_power_of_2(routing.num_groups),
            TOP_GROUPS=routing.top_groups,
            GROUP_BEST=routing.group_best,
            # One warp: a maximum over all experts needs no barrier.
            num_warps=1,
        )
    return out


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Pairs of a row and a chosen expert, grouped by expert. pairs: [P] int32, row * top_k + place.
    tiles: [M, 3] int32: expert (-1: unused), first pair, end of the expert's pairs."""

    pairs: torch.Tensor
    tiles: torch.Tensor


@triton.jit
def _count(routing, start, num_pairs, TOP_K: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    pair = start + tl.arange(0, BLOCK)
    inside = pair < num_pairs
    chosen = tl.load(routing + pair // TOP_K * (2 * TOP_K) + pair % TOP_K, mask=inside, other=0.0).to(tl.int32)
    return tl.histogram(chosen, EXPERTS_BLOCK, mask=inside)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    routing, counts, num_pairs, TOP_K: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    found = _count(routing, block * BLOCK, num_pairs, TOP_K, EXPERTS_BLOCK, BLOCK)
    tl.store(counts + block * EXPERTS_BLOCK + tl.arange(0, EXPERTS_BLOCK), found)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort_kernel(
    routing,
    counted,
    pairs,
    tiles,
    num_pairs,
    num_tiles,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Program (expert): finds its pairs, in order of rows, and its tiles."""
    expert = tl.program_id(0)
    index, offset, part = tl.arange(0, EXPERTS_BLOCK), tl.arange(0, BLOCK), tl.arange(0, TILES_AT_ONCE)
    counts = tl.zeros((EXPERTS_BLOCK,), tl.int32)
    if COUNTED:
        num_blocks = tl.cdiv(num_pairs, BLOCK)
        for first_block in range(0, bound(num_blocks), SLICES_AT_ONCE):
            block = first_block + tl.arange(0, SLICES_AT_ONCE)[:, None]
            at = counted + block * EXPERTS_BLOCK + index[None, :]
            counts += tl.sum(tl.load(at, mask=block < num_blocks, other=0), 0)
    else:
        for start in range(0, bound(num_pairs), BLOCK):
            counts += _count(routing, start, num_pairs, TOP_K, EXPERTS_BLOCK, BLOCK)
    own_tiles = (counts + BLOCK_M - 1) // BLOCK_M
    is_earlier, is_own = index < expert, index == expert
    first = tl.sum(tl.where(is_earlier, counts, 0), 0)
    end = first + tl.sum(tl.where(is_own, counts, 0), 0)
    first_tile = tl.sum(tl.where(is_earlier, own_tiles, 0), 0)
    end_tile = first_tile + tl.sum(tl.where(is_own, own_tiles, 0), 0)
    for start in range(bound(first_tile), bound(end_tile), TILES_AT_ONCE):
        to = tiles + 3 * (start + part)
        inside = start + part < end_tile
        tl.store(to, tl.zeros_like(part) + expert, mask=inside)
        tl.store(to + 1, first + (start + part - first_tile) * BLOCK_M, mask=inside)
        tl.store(to + 2, tl.zeros_like(part) + end, mask=inside)
    if expert == EXPERTS - 1:
        for start in range(bound(end_tile), bound(num_tiles), TILES_AT_ONCE):
            tl.store(tiles + 3 * (start + part), tl.full((TILES_AT_ONCE,), -1, tl.int32), mask=start + part < num_tiles)
    if first < end:
        filled = first
        for start in range(0, bound(num_pairs), BLOCK):
            pair = start + offset
            inside = pair < num_pairs
            chosen = tl.load(routing + pair // TOP_K * (2 * TOP_K) + pair % TOP_K, mask=inside, other=-1.0)
            found = (chosen.to(tl.int32) == expert) & inside
            tl.store(pairs + filled + tl.cumsum(found.to(tl.int32), 0) - 1, pair, mask=found)
            filled += tl.sum(found.to(tl.int32), 0)


def sort_by_expert(routing: torch.Tensor, num_experts: int, block_m: int) -> ExpertTiles:
    """Group a step's pairs by expert. routing: [T, 2 * top_k] float32, from `route`. block_m: pairs per
    tile."""
    assert routing.is_contiguous(), "rows lie one behind the other"
    top_k = routing.shape[1] // 2
    num_pairs = len(routing) * top_k
    num_tiles = num_pairs // block_m + min(num_experts, num_pairs)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=routing.device)
    tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=routing.device)
    bins = max(LEAST_BINS, next_power_of_2(num_experts))
    block, num_warps, counted = PAIRS, 4, None
    if num_pairs > MANY_PAIRS:
        block, num_warps = PAIRS_OF_MANY, 8
        num_blocks = blocks_of(num_pairs, block)
        counted = torch.empty(num_blocks, bins, dtype=torch.int32, device=routing.device)
        shape = {"TOP_K": top_k, "EXPERTS_BLOCK": bins, "BLOCK": block, "num_warps": num_warps}
        launch(_count_kernel, (num_blocks,), routing, counted, num_pairs, **shape)
    launch(
        _sort_kernel,
        (num_experts,),
        routing,
        counted,
        pairs,
        tiles,
        num_pairs,
        num_tiles,
        TOP_K=top_k,
        EXPERTS=num_experts,
        EXPERTS_BLOCK=bins,
        COUNTED=counted is not None,
        BLOCK=block,
        BLOCK_M=block_m,
        num_warps=num_warps,
    )
    return ExpertTiles(pairs, tiles)


@triton.jit
def _gate_rows_kernel(x, gate, out, width, x_stride, gate_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    share = 1.0 / (tl.exp(-tl.load(gate + row * gate_stride).to(tl.float32)) + 1.0)
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, narrow(value * share, out.dtype.element_ty), mask=inside)


def gate_rows(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate) per row; see `quire.kernels.experts.gate_rows`."""
    assert x.stride(1) == 1, "the elements of a row lie side by side"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        width = x.shape[1]
        grid = len(x), blocks_of(width, COLUMNS)
        strides = x.stride(0), gate.stride(0)
        launch(_gate_rows_kernel, grid, x, gate, out, width, *strides, BLOCK=COLUMNS, num_warps=4)
    return out
