"""Norms over heads, rotation and the write to pages in one launch, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from quire.kernels import reference
from quire.kernels.arguments import CacheScale, HeadWeights, LayerAttention, NormWeights
from quire.kernels.triton.qkv_write import prepare_heads
from tests.kernels.triton.attention_cases import NAN, TOLERANCE

SLOTS = torch.tensor([17, -1, 3, 40, 8])
"""The second token is padding."""
EPSILON = 1e-3


@dataclass(frozen=True)
class Turn:
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    rotary: int
    norm: bool
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    page_dtype: torch.dtype | None = None


SHAPES = {
    "rotation": Shape(4, 2, 16, 16, False),
    "norm-and-rotation": Shape(4, 2, 16, 16, True),
    "more-heads-than-a-program-takes": Shape(9, 9, 8, 8, True, block_size=8),
    "part-of-a-head": Shape(3, 1, 80, 32, True),
    "odd-halves": Shape(2, 1, 80, 80, False, block_size=32),
    "neither": Shape(4, 2, 16, 0, False),
    "norm": Shape(4, 2, 24, 0, True),
    "bfloat16": Shape(4, 2, 64, 64, True, dtype=torch.bfloat16),
    "float16": Shape(4, 2, 32, 16, False, dtype=torch.float16),
    "float32-pages": Shape(4, 2, 16, 16, True, dtype=torch.bfloat16, page_dtype=torch.float32),
}


@pytest.mark.parametrize("name", SHAPES)
def test_prepare_heads(name: str, device: torch.device) -> None:
    shape, slots = SHAPES[name], SLOTS.to(device)
    generator = torch.Generator().manual_seed(0)
    tokens, width = len(SLOTS), shape.heads + 2 * shape.kv_heads
    qkv = torch.randn(tokens, width * shape.dim, generator=generator).to(device, shape.dtype)
    before = qkv.clone()
    weights = [torch.randn(shape.dim, generator=generator).to(device, shape.dtype) for _ in range(2)]
    norms = [NormWeights(shape.dim, weight, None, EPSILON, False) if shape.norm else None for weight in weights]
    angles = torch.randn(tokens, shape.rotary // 2, generator=generator).to(device)
    turn = Turn(angles.cos(), angles.sin()) if shape.rotary else None
    layer = LayerAttention(0, shape.heads, shape.kv_heads, shape.dim, 1.0)
    page_shape = (6, 2, shape.block_size, shape.kv_heads, shape.dim)
    pages = torch.full(page_shape, NAN, dtype=shape.page_dtype or shape.dtype, device=device)

    prepare_heads(HeadWeights(layer, *norms), qkv, turn, pages, slots)

    query, key, value = (
        before.view(tokens, width, shape.dim).double().split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    )
    query, key = (
        _turned(_normed(part, weight, shape.norm), turn) for part, weight in zip((query, key), weights, strict=True)
    )
    close = {"rtol": TOLERANCE[shape.dtype], "atol": TOLERANCE[shape.dtype]}
    cut = shape.heads * shape.dim
    torch.testing.assert_close(qkv[:, :cut].double(), query.flatten(1), **close)
    assert torch.equal(qkv[:, cut:], before[:, cut:])
    written = slots[slots >= 0]
    stored = pages[written // shape.block_size, :, written % shape.block_size].double()
    torch.testing.assert_close(stored[:, 0], key[slots >= 0], **close)
    assert torch.equal(stored[:, 1], value[slots >= 0])
    assert pages.isnan().all(dim=-1).all(dim=-1).sum() == pages.shape[0] * 2 * shape.block_size - 2 * len(written)


def _normed(heads: torch.Tensor, weight: torch.Tensor, norm: bool) -> torch.Tensor:
    if not norm:
        return heads
    return heads * torch.rsqrt((heads * heads).mean(-1, keepdim=True) + EPSILON) * weight.double()


def _turned(heads: torch.Tensor, turn: Turn | None) -> torch.Tensor:
    if turn is None:
        return heads
    half = turn.cos.shape[1]
    first, second, rest = heads.split([half, half, heads.shape[-1] - 2 * half], dim=-1)
    cos, sin = turn.cos.double()[:, None], turn.sin.double()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def test_float8_pages_are_written_as_their_twin_does(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    key, value = (torch.randn(5, 3, 24, generator=generator) * 10.0 ** torch.arange(-4, 4).repeat(3) for _ in range(2))
    key[0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -1e9])
    slots, pages = SLOTS.to(device), torch.zeros(6, 2, 8, 3, 24, dtype=torch.uint8, device=device)
    expected, kept = torch.zeros(6, 2, 8, 3, 24).to(torch.float8_e4m3fn), SLOTS >= 0
    qkv = torch.cat((torch.zeros(5, 96), key.flatten(1), value.flatten(1)), dim=1).to(device)
    for scale in (CacheScale(), CacheScale(0.37, 11.0)):  # of the layer, as the torch back end divides by them
        shape = LayerAttention(0, 4, 3, 24, 1.0, cache_scale=scale)
        prepare_heads(HeadWeights(shape, None, None), qkv, None, pages, slots)
        scaled = [rows[kept] if by == 1 else rows[kept] / by for rows, by in ((key, scale.key), (value, scale.value))]
        reference.write_kv(expected, reference.key_rows(SLOTS[kept], 8), *scaled)
        assert_same_numbers(pages, expected, num_nan=3)


def assert_same_numbers(pages: torch.Tensor, expected: torch.Tensor, num_nan: int) -> None:
    """pages: e4m3 bits. NaN has either sign."""
    bits = expected.view(torch.uint8)
    is_nan = (bits & 0x7F) == 0x7F
    assert is_nan.sum() == num_nan
    assert torch.equal(torch.where(is_nan, bits & 0x7F, bits), torch.where(is_nan, pages.cpu() & 0x7F, pages.cpu()))


def test_bits_do_not_depend_on_other_tokens(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    slots = SLOTS.to(device)
    qkv = torch.randn(5, 8 * 16, generator=generator).to(device)
    angles = torch.randn(5, 8, generator=generator).to(device)
    weight = torch.randn(16, generator=generator).to(device)
    norm = NormWeights(16, weight, None, EPSILON, False)
    heads = HeadWeights(LayerAttention(0, 4, 2, 16, 1.0), norm, norm)
    pages, alone_pages = torch.zeros(2, 6, 2, 8, 2, 16, device=device)
    alone = qkv[3:4].clone()
    prepare_heads(heads, qkv, Turn(angles.cos(), angles.sin()), pages, slots)
    prepare_heads(heads, alone, Turn(angles[3:4].cos(), angles[3:4].sin()), alone_pages, slots[3:4])
    assert torch.equal(alone[0], qkv[3])
    assert torch.equal(alone_pages[5], pages[5])
