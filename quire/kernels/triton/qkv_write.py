"""Head norms, rotation, and writing of keys and values to pages, in one launch between projection and attention. Limit:
memory bandwidth (for decodes, the launch)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.arguments import CacheScale, HeadWeights, NormWeights
from quire.kernels.rotation import DeviceRotation
from quire.kernels.triton.float8 import as_bits, to_cache
from quire.kernels.triton.runtime import bind

HEADS = 8
ELEMENTS = 2048
"""Minimum elements per program: 32 per thread of two warps."""


@triton.jit
def _normed(part, scale, weight, dims, mask, NORM: tl.constexpr):
    if NORM:
        gain = tl.load(weight + dims, mask=mask, other=0.0).to(tl.float32)
        part = part * scale[:, None] * gain[None, :]
    return part


@triton.jit
def _stored(x, divisor, ELEMENT: tl.constexpr, SCALED: tl.constexpr):
    """x in the pages' format, divided by `divisor` if SCALED."""
    if SCALED:
        x = tl.div_rn(x.to(tl.float32), tl.zeros(x.shape, tl.float32) + divisor)
    return to_cache(x, ELEMENT)


@triton.jit
def _write_heads(
    source,
    target,
    inside,
    cos,
    sin,
    weight,
    epsilon,
    divisor,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Norm and rotate heads in float32, rounding once. source, target, cos, sin: [rows] pointers to each head's first
    element and its token's first angle. HALF: elements of each rotated half; the rest is not rotated. source and target
    may be equal."""
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    squares = tl.zeros((inside.shape[0],), tl.float32)
    if HALF:
        half = tl.arange(0, HALF_BLOCK)
        mask = inside[:, None] & (half < HALF)[None, :]
        first_from = source[:, None] + half[None, :]
        first = tl.load(first_from, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(first_from + HALF, mask=mask, other=0.0).to(tl.float32)
        squares += tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if REST:
        rest = 2 * HALF + tl.arange(0, REST_BLOCK)
        rest_mask = inside[:, None] & (rest < HEAD_DIM)[None, :]
        plain = tl.load(source[:, None] + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
        squares += tl.sum(plain * plain, 1)
    scale = squares
    if NORM:
        scale = tl.rsqrt(squares / HEAD_DIM + epsilon)
    # No thread stores before all have loaded.
    tl.debug_barrier()
    if HALF:
        first = _normed(first, scale, weight, half, half < HALF, NORM)
        second = _normed(second, scale, weight + HALF, half, half < HALF, NORM)
        cosine = tl.load(cos[:, None] + half[None, :], mask=mask, other=0.0)
        sine = tl.load(sin[:, None] + half[None, :], mask=mask, other=0.0)
        turned_first = tl.fma(first, cosine, -(second * sine))
        turned_second = tl.fma(second, cosine, first * sine)
        first_to = target[:, None] + half[None, :]
        tl.store(first_to, _stored(turned_first, divisor, target.dtype.element_ty, SCALED), mask=mask)
        tl.store(first_to + HALF, _stored(turned_second, divisor, target.dtype.element_ty, SCALED), mask=mask)
    if REST:
        plain = _normed(plain, scale, weight, rest, rest < HEAD_DIM, NORM)
        stored = _stored(plain, divisor, target.dtype.element_ty, SCALED)
        tl.store(target[:, None] + rest[None, :], stored, mask=rest_mask)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
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
    num_tokens,
    query_stride,
    key_stride,
    value_stride,
    epsilon,
    key_scale,
    value_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (TOKENS tokens, HEADS query, key or value heads). NUM_HEADS: 0 leaves queries unchanged."""
    QUERY_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KEY_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0) * TOKENS + row // HEADS
    present = token < num_tokens
    token = token.to(tl.int64)
    part = tl.program_id(1)
    if part < QUERY_PARTS:
        head = part * HEADS + row % HEADS
        queries = query + token * query_stride + head * HEAD_DIM
        _write_heads(
            queries, queries, present & (head < NUM_HEADS), cos + token * HALF, sin + token * HALF, query_weight,
            epsilon, key_scale, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, NORM, False,
        )  # fmt: skip
    else:
        slot = tl.load(slots + token, mask=present, other=-1)
        at = slot // BLOCK_SIZE * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE
        if part < QUERY_PARTS + KEY_PARTS:
            head = (part - QUERY_PARTS) * HEADS + row % HEADS
            _write_heads(
                key + token * key_stride + head * HEAD_DIM, pages + (at * NUM_KV_HEADS + head) * HEAD_DIM,
                (slot >= 0) & (head < NUM_KV_HEADS), cos + token * HALF, sin + token * HALF, key_weight,
                epsilon, key_scale, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, NORM, SCALED,
            )  # fmt: skip
        else:
            head = (part - QUERY_PARTS - KEY_PARTS) * HEADS + row % HEADS
            dims = tl.arange(0, DIM_BLOCK)[None, :]
            mask = ((slot >= 0) & (head < NUM_KV_HEADS))[:, None] & (dims < HEAD_DIM)
            values = tl.load((value + token * value_stride + head * HEAD_DIM)[:, None] + dims, mask=mask)
            target = pages + ((at + BLOCK_SIZE) * NUM_KV_HEADS + head) * HEAD_DIM
            tl.store(target[:, None] + dims, _stored(values, value_scale, pages.dtype.element_ty, SCALED), mask=mask)


class HeadPreparation:
    """`prepare_heads` bound to one layer and its pages, for launches in every step."""

    def __init__(self, heads: HeadWeights, pages: torch.Tensor) -> None:
        self._norms = (heads.query_norm, heads.key_norm)
        shape = heads.shape
        self._scale = shape.cache_scale
        self._pages = pages
        self._num_heads = shape.num_heads
        self._sizes = [count * shape.head_dim for count in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        self._kernels: dict[int, _WriteKernel] = {}

    def launch(self, qkv: torch.Tensor, rotation: DeviceRotation | None, slots: torch.Tensor) -> None:
        half = 0 if rotation is None else rotation.cos.shape[1]
        kernel = self._kernels.get(half)
        if kernel is None:
            # Without norms and rotation, queries need no change.
            num_heads = self._num_heads if self._norms[0] is not None or rotation is not None else 0
            kernel = _WriteKernel(self._pages, self._norms, num_heads, half, self._scale)
            self._kernels[half] = kernel
        query, key, value = qkv.split(self._sizes, 1)
        kernel.launch(query, key, value, slots, rotation)


def prepare_heads(
    heads: HeadWeights, qkv: torch.Tensor, rotation: DeviceRotation | None, pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """Norm and rotate queries in place; norm and rotate keys, and write keys and values to their pages. qkv: [T,
    (num_heads + 2 num_kv_heads) * head_dim], contiguous rows; keys and values stay. rotation: at the T positions, or
    None. pages: [num_blocks, 2, block_size, num_kv_heads, head_dim], any float dtype or e4m3 bits. slots: [T] int64,
    block * block_size + offset; < 0: not written."""
    HeadPreparation(heads, pages).launch(qkv, rotation, slots)


class _WriteKernel:
    """Kernel of HeadPreparation over one layer's pages. num_heads: query heads, 0 leaves them unchanged. half: angles
    per token, 0 for no rotation."""

    def __init__(
        self,
        pages: torch.Tensor,
        norms: tuple[NormWeights | None, NormWeights | None],
        num_heads: int,
        half: int,
        scale: CacheScale,
    ) -> None:
        pages = as_bits(pages)
        block_size, num_kv_heads, head_dim = pages.shape[2:]
        query_norm, key_norm = norms
        if query_norm is not None and key_norm is not None:
            assert query_norm.epsilon == key_norm.epsilon, "one epsilon for queries and keys"
        rest = head_dim - 2 * half
        heads = min(HEADS, triton.next_power_of_2(max(num_heads, num_kv_heads)))
        self._tokens = max(1, ELEMENTS // (heads * triton.next_power_of_2(head_dim)))
        self._num_parts = -(-num_heads // heads) + 2 * -(-num_kv_heads // heads)
        self._launch = bind(
            _write_kernel,
            {
                "pages": pages,
                # Without norms, any pointer serves as weights: the kernel does not read them.
                "query_weight": pages if query_norm is None else query_norm.weight,
                "key_weight": pages if key_norm is None else key_norm.weight,
                "epsilon": 0.0 if query_norm is None else query_norm.epsilon,
                "key_scale": scale.key,
                "value_scale": scale.value,
            },
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            HALF=half,
            HALF_BLOCK=triton.next_power_of_2(max(half, 1)),
            REST_BLOCK=triton.next_power_of_2(max(rest, 1)),
            DIM_BLOCK=triton.next_power_of_2(head_dim),
            NORM=query_norm is not None,
            SCALED=scale != CacheScale(),
            TOKENS=self._tokens,
            HEADS=heads,
            num_warps=2,
        )

    def launch(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        rotation: DeviceRotation | None,
    ) -> None:
        num_tokens = key.shape[0]
        # Without rotation, any pointer serves as angles: the kernel does not read them.
        cos, sin = (slots, slots) if rotation is None else (rotation.cos, rotation.sin)
        grid = -(-num_tokens // self._tokens), self._num_parts
        strides = query.stride(0), key.stride(0), value.stride(0)
        self._launch(grid, query, key, value, slots, cos, sin, num_tokens, *strides)
