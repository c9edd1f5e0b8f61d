"""Parts of the sampling kernels: scores, weights, uniform numbers, and sampling within a stretch of a row. A weight is
exp((score - largest) / temperature), as in `quire.sampling.draw`."""

from __future__ import annotations

import triton
import triton.language as tl

ONE = tl.constexpr(0x3F800000)
"""Bits of 1.0, the largest weight; bits of non-negative floats are ordered as their values."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Lowest finite float32."""


@triton.jit
def load_scores(row, tokens, mask):
    """Scores as float32, minus infinity where masked. row: pointer to the row's first score."""
    scores = tl.load(row + tokens, mask=mask, other=0).to(tl.float32)
    return tl.where(mask, scores, float("-inf"))


@triton.jit
def weigh(scores, largest, temperature):
    """exp((scores - largest) / temperature). largest: finite maximum of the row; temperature: > 0."""
    return tl.exp((scores - largest) / temperature)


@triton.jit
def load_weights(row, tokens, mask, largest, temperature):
    return weigh(load_scores(row, tokens, mask), largest, temperature)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, index):
    """Number `index` of a seed's (uint64) stream: float64 in (0, 1), bit for bit that of quire/sampling/draw.py."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    state = _mix(seed + golden) + (index.to(tl.uint64) + 1) * golden
    bits = (_mix(state) >> 12).to(tl.int64)  # 52 bits as a signed integer, whose conversion is shorter
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def position_of(cumulative, amounts, target, SIZE: tl.constexpr):
    """Index of the first entry whose cumulative amount exceeds the target, else the last with an amount. All [SIZE]
    float64."""
    places = tl.arange(0, SIZE)
    first = tl.min(tl.where((amounts > 0) & (cumulative > target), places, SIZE))
    last = tl.max(tl.where(amounts > 0, places, 0))
    return tl.minimum(first, last)


@triton.jit
def draw_within(row, start, end, likeliest, target, lowest, largest, temperature, TILE: tl.constexpr):
    """Token of start..end at which the ordered sum of weights >= `lowest` exceeds `target` (float64). likeliest: if all
    weights vanish in rounding."""
    token = likeliest
    position = tl.full([], 0, tl.int32) + start
    while position < end:
        tokens = position + tl.arange(0, TILE)
        weights = load_weights(row, tokens, tokens < end, largest, temperature)
        weights = tl.where(weights >= lowest, weights, 0).to(tl.float64)
        cumulative = tl.cumsum(weights, 0)
        total = tl.max(cumulative)
        if total > 0:
            token = position + position_of(cumulative, weights, target, TILE)
        position = tl.where(total > target, end, position + TILE)
        target -= total
    return token
