"""Indexer of sparse latent attention on a device: scores of all visible keys, and the best. Counting builds the
threshold score two bits at a time; positions that reach it are written in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.attention.device_batch import DeviceBatch
from quire.kernels.arguments import IndexShape
from quire.kernels.rotation import DeviceRotation
from quire.kernels.triton.bound_launch import ALIGNMENT
from quire.kernels.triton.float8 import as_bits, from_cache, operand, to_cache
from quire.kernels.triton.paged_attention import BATCH_COLUMNS, sequence_and_keys
from quire.kernels.triton.runtime import blocks_of, bound, dot, launch, next_power_of_2

SMALLEST_TILE = 16
"""Rows of the matrix units' smallest tile."""
KEYS = 64
"""Keys per tile of scores."""
PART = 1024
"""Keys per program that scores."""
BLOCK = 1024
"""Scores that a program compares at a time."""
SCRATCH_ELEMENTS = 2**24
"""Scores held in scratch at a time, at least those of one token."""


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _prepare_kernel(
    query,
    key,
    pages,
    slots,
    cos,
    sin,
    page_stride,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    OFFSET: tl.constexpr,
    TOKEN: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Rotates, and stores keys. Program (token; 0: its queries, rotated in place, 1: its key, to the page). Rotated
    pairs are HALF apart."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DIM_BLOCK)
    is_turned = dims < 2 * HALF
    cosine = tl.full((DIM_BLOCK,), 1.0, tl.float32)
    sine = tl.zeros((DIM_BLOCK,), tl.float32)
    if TURNS:
        angle = token * HALF + dims % HALF
        cosine = tl.load(cos + angle, mask=is_turned, other=1.0)
        sine = tl.load(sin + angle, mask=is_turned, other=0.0)
        sine = tl.where(dims < HALF, -sine, sine)
    partner = tl.where(is_turned, tl.where(dims < HALF, dims + HALF, dims - HALF), dims)
    if tl.program_id(1) == 0:
        if TURNS:
            heads = tl.arange(0, HEADS_BLOCK)
            at = query + (token * NUM_HEADS + heads)[:, None] * DIM
            inside = (heads < NUM_HEADS)[:, None] & is_turned[None, :]
            own = tl.load(at + dims[None, :], mask=inside, other=0.0).to(tl.float32)
            other = tl.load(at + partner[None, :], mask=inside, other=0.0).to(tl.float32)
            tl.debug_barrier()  # no thread stores before all have loaded
            turned = tl.fma(own, tl.broadcast_to(cosine[None, :], own.shape), other * sine[None, :])
            tl.store(at + dims[None, :], turned.to(query.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token)
        written = (dims < DIM) & (slot >= 0)
        own_key = tl.load(key + token * DIM + dims, mask=written, other=0.0).to(tl.float32)
        other_key = tl.load(key + token * DIM + partner, mask=written, other=0.0).to(tl.float32)
        turned_key = tl.fma(own_key, cosine, other_key * sine)
        to = pages + slot // BLOCK_SIZE * page_stride + slot % BLOCK_SIZE * TOKEN + OFFSET
        tl.store(to + dims, to_cache(turned_key, pages.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["num_seqs", "first_token"], do_not_specialize_on_alignment=BATCH_COLUMNS)
def _scores_kernel(
    query,
    weights,
    pages,
    scores,
    rows,
    query_start,
    seq_lens,
    tables,
    num_seqs,
    first_token,
    page_stride,
    table_stride,
    scores_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOP: tl.constexpr,
    OFFSET: tl.constexpr,
    TOKEN: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
):
    """Scores of visible keys. Program (token after `first_token`, PART keys). scores: [tokens, scores_stride]
    float32."""
    token = first_token + tl.program_id(0)
    if token >= tl.load(query_start + num_seqs):
        return
    sequence, seen = sequence_and_keys(query_start, seq_lens, token, num_seqs)
    start = tl.program_id(1) * PART
    if seen <= TOP or start >= seen:
        return
    heads, dims = tl.arange(0, HEADS_BLOCK), tl.arange(0, DIM_BLOCK)
    at = query + (token.to(tl.int64) * NUM_HEADS + heads)[:, None] * DIM + dims[None, :]
    queries = tl.load(at, mask=(heads < NUM_HEADS)[:, None] & (dims < DIM)[None, :], other=0.0)
    queries = operand(queries, pages.dtype.element_ty)
    at_weight = weights + token.to(tl.int64) * NUM_HEADS + heads
    factors = tl.load(at_weight, mask=heads < NUM_HEADS, other=0.0).to(tl.float32) * scale
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    for tile in range(bound(start), bound(tl.minimum(seen, start + PART)), KEYS):
        places = tile + tl.arange(0, KEYS)
        present = places < seen
        block = tl.load(table + places // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
        from_page = pages + block * page_stride + places % BLOCK_SIZE * TOKEN + OFFSET
        inside = present[:, None] & (dims < DIM)[None, :]
        keys = from_cache(tl.load(from_page[:, None] + dims[None, :], mask=inside, other=0.0), queries.dtype)
        products = dot(queries, tl.trans(keys), tl.zeros((HEADS_BLOCK, KEYS), tl.float32))
        total = tl.sum(tl.maximum(products, 0.0) * factors[:, None], 0)
        total = tl.where(total == 0.0, 0.0, total)  # no -0.0, whose bits are below those of 0.0
        tl.store(scores + tl.program_id(0).to(tl.int64) * scores_stride + places, total, mask=present)


@triton.jit
def _ordered(scores, at, length):
    """Scores as integers of the same order, 0 to 2^32, [n] int64; -1 after the last."""
    bits = tl.load(scores + at, mask=at < length, other=0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    return tl.where(at < length, bits, -1)


@triton.jit(do_not_specialize=["num_seqs", "first_token"], do_not_specialize_on_alignment=BATCH_COLUMNS)
def _choose_kernel(
    scores,
    selected,
    query_start,
    seq_lens,
    num_seqs,
    first_token,
    scores_stride,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = first_token + tl.program_id(0)
    if token >= tl.load(query_start + num_seqs):
        return
    _, seen = sequence_and_keys(query_start, seq_lens, token, num_seqs)
    if seen <= TOP:
        return
    own = scores + tl.program_id(0).to(tl.int64) * scores_stride
    one = tl.full((1,), 1, tl.int64)
    least = tl.zeros((1,), tl.int64)
    for step in range(16):
        quarter = one << (30 - 2 * step)
        first = tl.zeros((BLOCK,), tl.int32)
        second = tl.zeros((BLOCK,), tl.int32)
        third = tl.zeros((BLOCK,), tl.int32)
        for tile in range(0, bound(seen), BLOCK):
            values = _ordered(own, tile + tl.arange(0, BLOCK), seen)
            first += (values >= least + quarter).to(tl.int32)
            second += (values >= least + 2 * quarter).to(tl.int32)
            third += (values >= least + 3 * quarter).to(tl.int32)
        reached = (tl.sum(first, 0) >= TOP).to(tl.int64) + (tl.sum(second, 0) >= TOP).to(tl.int64)
        least += (reached + (tl.sum(third, 0) >= TOP).to(tl.int64)) * quarter
    above = tl.zeros((BLOCK,), tl.int32)
    for tile in range(0, bound(seen), BLOCK):
        above += (_ordered(own, tile + tl.arange(0, BLOCK), seen) > least).to(tl.int32)
    equals_left = TOP - tl.sum(above, 0)
    taken = 0
    for tile in range(0, bound(seen), BLOCK):
        at = tile + tl.arange(0, BLOCK)
        values = _ordered(own, at, seen)
        is_equal = (values == least).to(tl.int32)
        is_first = (tl.cumsum(is_equal, 0) <= equals_left) & (is_equal > 0)
        takes = ((values > least) | is_first).to(tl.int32)
        place = taken + tl.cumsum(takes, 0) - takes
        tl.store(selected + token.to(tl.int64) * TOP + place, at, mask=takes > 0)
        equals_left -= tl.sum(is_first.to(tl.int32), 0)
        taken += tl.sum(takes, 0)


def select_keys(
    shape: IndexShape,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rotation: DeviceRotation | None,
    pages: torch.Tensor,
    batch: DeviceBatch,
    group: int,
    selected: torch.Tensor,
) -> None:
    """Rotate, write the indexer's keys to their pages, and choose the keys that each token reads
    (`AttentionStep.select_keys`). inputs: contiguous; queries are rotated in place. pages: [num_blocks, block_size,
    latent_width + dim]. group: layer's KV group. selected: [T, top] int32; only tokens with more than `top` visible
    keys are written."""
    query, key, weights = inputs
    slots, tables = batch.slot_mapping[group], batch.block_tables[group]
    # Without rotation, any pointer serves as angles: the kernel does not read them.
    cos, sin = (slots, slots) if rotation is None else (rotation.cos, rotation.sin)
    sizes = {
        "NUM_HEADS": shape.num_heads,
        "DIM": shape.dim,
        "OFFSET": shape.latent_width,
        "TOKEN": pages.shape[2],
        "DIM_BLOCK": max(SMALLEST_TILE, next_power_of_2(shape.dim)),
        "HEADS_BLOCK": max(SMALLEST_TILE, next_power_of_2(shape.num_heads)),
        "BLOCK_SIZE": pages.shape[1],
    }
    grid = batch.num_tokens, 2
    half, turns = shape.rope_dim // 2, rotation is not None
    strides = pages.stride(0), tables.stride(0)
    launch(
        _prepare_kernel, grid, query, key, as_bits(pages), slots, cos, sin, strides[0], HALF=half, TURNS=turns, **sizes
    )
    length = batch.max_seq_len
    if length <= shape.top:
        return
    at_once = min(batch.num_tokens, max(1, SCRATCH_ELEMENTS // length))
    # Triton compiles separate kernels for strides divisible by 16 and others; make all divisible.
    scores_stride = ALIGNMENT * blocks_of(length, ALIGNMENT)
    scores = torch.empty(at_once, scores_stride, dtype=torch.float32, device=query.device)
    lengths = batch.query_start, batch.seq_lens
    for first in range(0, batch.num_tokens, at_once):
        count = min(at_once, batch.num_tokens - first)
        launch(
            _scores_kernel,
            (count, blocks_of(length, PART)),
            query,
            weights,
            pages,
            scores,
            batch.rows,
            *lengths,
            tables,
            batch.num_seqs,
            first,
            *strides,
            scores_stride,
            shape.scale,
            TOP=shape.top,
            KEYS=KEYS,
            PART=PART,
            num_warps=4,
            **sizes,
        )
        launch(
            _choose_kernel,
            (count,),
            scores,
            selected,
            *lengths,
            batch.num_seqs,
            first,
            scores_stride,
            TOP=shape.top,
            BLOCK=BLOCK,
            num_warps=4,
        )
