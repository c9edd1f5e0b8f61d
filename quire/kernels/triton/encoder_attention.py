"""Bidirectional attention over sequences, without padding. A program computes TILE_M rows of one sequence and head:
a row's bits do not depend on other sequences."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.attention_core import LOG2_E, NOTHING
from quire.kernels.triton.paged_attention import find_sequence
from quire.kernels.triton.runtime import bound, dot, launch, narrow, next_power_of_2

TILE_M = 64
TILE_N = 64
SMALLEST_BLOCK = 16
WIDE_BYTES = 256
"""Bytes of a head's row above which fewer tiles are in flight."""


@triton.jit
def _load_halves(
    heads,
    cos,
    sin,
    token,
    inside,
    stride,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATES: tl.constexpr,
):
    """Rotated halves of a head of some tokens, [rows, BLOCK] float32 each."""
    dims = tl.arange(0, BLOCK)
    mask = inside[:, None] & (dims < HALF)[None, :]
    at = heads + token.to(tl.int64)[:, None] * stride + dims[None, :]
    left = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if ROTATES:
        angle = token.to(tl.int64)[:, None] * HALF + dims[None, :]
        cosine = tl.load(cos + angle, mask=mask, other=0.0)
        sine = tl.load(sin + angle, mask=mask, other=0.0)
        left, right = left * cosine - right * sine, right * cosine + left * sine
    return left, right


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["query_start"])
def _attend_kernel(
    qkv,
    cos,
    sin,
    query_start,
    out,
    num_seqs,
    qkv_stride,
    out_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    ROTATES: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    tile_of_rows = tl.program_id(0)
    sequence = find_sequence(query_start, tile_of_rows, num_seqs, M)
    first = tl.load(query_start + sequence)
    length = tl.load(query_start + sequence + 1) - first
    begin = (tile_of_rows - first // M - sequence) * M
    if begin >= length:
        return
    head = tl.program_id(1)
    dtype = out.dtype.element_ty
    rows = begin + tl.arange(0, M)
    is_row = rows < length
    width = NUM_HEADS * 2 * HALF
    query = qkv + head * 2 * HALF
    left, right = _load_halves(query, cos, sin, first + rows, is_row, qkv_stride, HALF, BLOCK, ROTATES)
    left, right = narrow(left * scale, dtype), narrow(right * scale, dtype)
    maximum = tl.full((M,), NOTHING, tl.float32)
    total = tl.zeros((M,), tl.float32)
    summed = tl.zeros((M, DIM_BLOCK), tl.float32)
    dims = tl.arange(0, DIM_BLOCK)
    start, end = 0, length
    if WINDOW > 0:
        start = tl.maximum(begin - WINDOW, 0) // N * N
        end = tl.minimum(length, begin + M + WINDOW)
    for tile in range(bound(start), bound(end), N):
        keys = tile + tl.arange(0, N)
        is_key = keys < length
        key_left, key_right = _load_halves(
            query + width, cos, sin, first + keys, is_key, qkv_stride, HALF, BLOCK, ROTATES
        )
        scores = dot(left, tl.trans(narrow(key_left, dtype)), tl.zeros((M, N), tl.float32))
        scores = dot(right, tl.trans(narrow(key_right, dtype)), scores)
        sees = is_row[:, None] & is_key[None, :]
        if WINDOW > 0:
            sees = sees & (tl.abs(rows[:, None] - keys[None, :]) <= WINDOW)
        scores = tl.where(sees, scores, NOTHING)
        top = tl.maximum(maximum, tl.max(scores, axis=1))
        decay = tl.exp2(maximum - top)
        weights = tl.where(sees, tl.exp2(scores - top[:, None]), 0.0)
        mask = is_key[:, None] & (dims < 2 * HALF)[None, :]
        at = query + 2 * width + (first + keys).to(tl.int64)[:, None] * qkv_stride + dims[None, :]
        values = tl.load(at, mask=mask, other=0.0)
        summed = dot(narrow(weights, dtype), values, summed * decay[:, None])
        total = tl.fma(total, decay, tl.sum(weights, axis=1))
        maximum = top
    result = summed / tl.where(is_row, total, 1.0)[:, None]
    at = out + (first + rows).to(tl.int64)[:, None] * out_stride + head * 2 * HALF + dims[None, :]
    tl.store(at, narrow(result, dtype), mask=is_row[:, None] & (dims < 2 * HALF)[None, :])


def attend_both_ways(
    qkv: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    query_start: torch.Tensor,
    num_heads: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend in both directions within each sequence, for encoders. qkv: [T, 3 * num_heads * head_dim], head_dim even.
    rotation: cos and sin, [T, head_dim / 2] float32 each (None: no rotation). query_start: [S + 1] int32, starts of
    sequences, then T. window: maximum distance on either side (None: any). Returns [T, num_heads * head_dim] in qkv's
    dtype."""
    width = qkv.shape[1] // 3
    half, odd = divmod(width // num_heads, 2)
    assert not odd, "a head has two halves"
    assert rotation is None or rotation[0].shape[1] == half, "the rotation is of whole heads"
    out = torch.empty(len(qkv), width, dtype=qkv.dtype, device=qkv.device)
    cos, sin = rotation or (None, None)
    num_seqs = len(query_start) - 1
    dim_block = max(SMALLEST_BLOCK, next_power_of_2(2 * half))
    launch(
        _attend_kernel,
        (len(qkv) // TILE_M + num_seqs, num_heads),
        qkv,
        cos,
        sin,
        query_start,
        out,
        num_seqs,
        qkv.stride(0),
        out.stride(0),
        scale * LOG2_E.value,
        NUM_HEADS=num_heads,
        HALF=half,
        BLOCK=max(SMALLEST_BLOCK, next_power_of_2(half)),
        DIM_BLOCK=dim_block,
        WINDOW=window or 0,
        ROTATES=rotation is not None,
        M=TILE_M,
        N=TILE_N,
        num_warps=4,
        # Three tiles of wide heads in float32 exceed a multiprocessor's shared memory.
        num_stages=2 if dim_block * qkv.itemsize > WIDE_BYTES else 3,
    )
    return out
