"""From the projection's output to attention's input, in one launch: norms over heads, rotation, and keys and values
into their pages.

Limit: every element of queries, keys and values is read once and written once. For T tokens of H + 2 Hkv heads of D
elements of b bytes that is 2 T (H + 2 Hkv) D b bytes, and 4 T rotary_dim of cosines and sines (H = 32, Hkv = 8,
D = 128, bfloat16: 25 KB a token; 8192 tokens: 0.2 GB, 47 us at 4.3 TB/s; a decode of 256 tokens: 1.5 us, less than its
launch). A program takes HEADS heads of one token: contiguous bytes, 16 for each thread and load, cosines once.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import launch
from quire.layers.operations import HeadWeights, NormWeights

HEADS = 8
"""Heads of one program."""


class Rotation(Protocol):
    """cos, sin: [T, rotary_dim / 2] float32, contiguous."""

    @property
    def cos(self) -> torch.Tensor: ...

    @property
    def sin(self) -> torch.Tensor: ...


@triton.jit
def _normed(part, scale, weight, dims, mask, NORM: tl.constexpr):
    """One part of the heads times their scale and the norm's weight."""
    if NORM:
        gain = tl.load(weight + dims, mask=mask, other=0.0).to(tl.float32)
        part = part * scale[:, None] * gain[None, :]
    return part


@triton.jit
def _heads_kernel(
    source,
    target,
    source_at,
    target_at,
    heads,
    num_heads,
    cos,
    sin,
    weight,
    epsilon,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """Norm and rotation of some heads of one token, float32 throughout, rounded once. source_at, target_at: where head
    0 begins. HALF: elements of each rotated half; the rest of a head is not rotated. All is loaded before any is
    stored, so that source and target may be one."""
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    inside = (heads < num_heads)[:, None]
    at = heads[:, None] * HEAD_DIM
    squares = tl.zeros((heads.shape[0],), tl.float32)
    if HALF:
        half = tl.arange(0, HALF_BLOCK)
        half_mask = half < HALF
        mask = inside & half_mask[None, :]
        first_at = at + half[None, :]
        first = tl.load(source + source_at + first_at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + source_at + first_at + HALF, mask=mask, other=0.0).to(tl.float32)
        squares += tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if REST:
        rest = tl.arange(0, REST_BLOCK)
        rest_mask = rest < REST
        rest_at = at + 2 * HALF + rest[None, :]
        plain = tl.load(source + source_at + rest_at, mask=inside & rest_mask[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(plain * plain, 1)
    scale = tl.rsqrt(squares / HEAD_DIM + epsilon)
    # No thread stores before all have loaded.
    tl.debug_barrier()
    if HALF:
        first = _normed(first, scale, weight, half, half_mask, NORM)
        second = _normed(second, scale, weight + HALF, half, half_mask, NORM)
        cosine = tl.load(cos + half, mask=half_mask, other=0.0)[None, :]
        sine = tl.load(sin + half, mask=half_mask, other=0.0)[None, :]
        turned_first = tl.fma(first, tl.broadcast_to(cosine, first.shape), -(second * sine))
        turned_second = tl.fma(second, tl.broadcast_to(cosine, first.shape), first * sine)
        tl.store(target + target_at + first_at, turned_first.to(target.dtype.element_ty), mask=mask)
        tl.store(target + target_at + first_at + HALF, turned_second.to(target.dtype.element_ty), mask=mask)
    if REST:
        plain = _normed(plain, scale, weight + 2 * HALF, rest, rest_mask, NORM)
        tl.store(target + target_at + rest_at, plain.to(target.dtype.element_ty), mask=inside & rest_mask[None, :])


@triton.jit
def _copied_heads(
    source, target, source_at, target_at, heads, num_heads, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr
):
    dims = tl.arange(0, DIM_BLOCK)
    mask = (heads < num_heads)[:, None] & (dims < HEAD_DIM)[None, :]
    at = heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(
        target + target_at + at, tl.load(source + source_at + at, mask=mask).to(target.dtype.element_ty), mask=mask
    )


@triton.jit
def _write_kernel(
    query,
    key,
    value,
    pages,
    slots,
    cos,
    sin,
    query_weight,
    key_weight,
    query_stride,
    key_stride,
    value_stride,
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (token, HEADS of its query, key or value heads). NUM_HEADS: 0 if queries stay as they are."""
    QUERY_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KEY_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cos += token * HALF
    sin += token * HALF
    if part < QUERY_PARTS:
        heads = part * HEADS + tl.arange(0, HEADS)
        _heads_kernel(
            query, query, token * query_stride, token * query_stride, heads, NUM_HEADS, cos, sin, query_weight,
            epsilon, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, NORM,
        )  # fmt: skip
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            row = slot // BLOCK_SIZE * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE
            if part < QUERY_PARTS + KEY_PARTS:
                heads = (part - QUERY_PARTS) * HEADS + tl.arange(0, HEADS)
                _heads_kernel(
                    key, pages, token * key_stride, row * (NUM_KV_HEADS * HEAD_DIM), heads, NUM_KV_HEADS, cos, sin,
                    key_weight, epsilon, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, NORM,
                )  # fmt: skip
            else:
                heads = (part - QUERY_PARTS - KEY_PARTS) * HEADS + tl.arange(0, HEADS)
                _copied_heads(
                    value, pages, token * value_stride, (row + BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM), heads,
                    NUM_KV_HEADS, HEAD_DIM, DIM_BLOCK,
                )  # fmt: skip


def prepare_heads(
    heads: HeadWeights, qkv: torch.Tensor, rotation: Rotation | None, pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """Norm and rotate queries in place; norm and rotate keys, and write keys and values to their pages.

    qkv: [T, (num_heads + 2 num_kv_heads) * head_dim], contiguous rows; its keys and values stay as they were. rotation:
    of the T tokens' positions, or None. pages: of the layer, [num_blocks, 2, block_size, num_kv_heads, head_dim], of
    any float dtype. slots: [T] int64, block * block_size + offset; below 0: the key and value are not written.
    """
    shape = heads.shape
    query, key, value = qkv.split(
        [count * shape.head_dim for count in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)], dim=1
    )
    norms = (heads.query_norm, heads.key_norm)
    # Without norms and rotation queries are what they are to be.
    num_heads = shape.num_heads if norms[0] is not None or rotation is not None else 0
    _launch(query, key, value, pages, slots, rotation, norms, num_heads)


def write_kv(pages: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Reshape and cache alone. key, value: [T, num_kv_heads, head_dim], each token's heads contiguous."""
    _launch(key.flatten(1), key.flatten(1), value.flatten(1), pages, slots, None, (None, None), 0)


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    rotation: Rotation | None,
    norms: tuple[NormWeights | None, NormWeights | None],
    num_heads: int,
) -> None:
    block_size, num_kv_heads, head_dim = pages.shape[2:]
    half = 0 if rotation is None else rotation.cos.shape[1]
    query_norm, key_norm = norms
    if query_norm is not None and key_norm is not None:
        assert query_norm.epsilon == key_norm.epsilon, "one epsilon for queries and keys"
    rest = head_dim - 2 * half
    programs = -(-num_heads // HEADS) + 2 * -(-num_kv_heads // HEADS)
    launch(
        _write_kernel,
        (key.shape[0], programs),
        query,
        key,
        value,
        pages,
        slots,
        # Pointers that are not followed.
        slots if rotation is None else rotation.cos,
        slots if rotation is None else rotation.sin,
        slots if query_norm is None else query_norm.weight,
        slots if key_norm is None else key_norm.weight,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        0.0 if query_norm is None else query_norm.epsilon,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(max(half, 1)),
        REST_BLOCK=triton.next_power_of_2(max(rest, 1)),
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        NORM=query_norm is not None,
        HEADS=HEADS,
        num_warps=2,
    )
