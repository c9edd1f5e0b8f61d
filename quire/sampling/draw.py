"""One token per row from one uniform number per row, by the inverse cumulative distribution. Numbers depend only on
(seed, index), and rows are bitwise independent of the batch."""

from __future__ import annotations

import numpy as np

BLOCK = 64
"""Block of weights: summed pairwise in float32, blocks one after the other in float64."""
MIN_TEMPERATURE = np.float32(1e-30)
"""Lowest temperature that differs; below it only the largest score is possible."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def compute_weights(scores: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    """Weights exp((score - largest) / temperature), so the largest weight is 1. scores: [R, vocab_size] float32;
    temperature: [R] float32 > 0. Returns [R, n] float32, n the next multiple of BLOCK, the surplus 0. A row with NaN or
    infinite scores gives NaN."""
    num_rows, vocab_size = scores.shape
    weights = np.empty((num_rows, -(-vocab_size // BLOCK) * BLOCK), np.float32)
    weights[:, vocab_size:] = 0
    used = weights[:, :vocab_size]
    np.subtract(scores, scores.max(axis=1, keepdims=True), out=used)
    np.divide(used, np.maximum(temperature, MIN_TEMPERATURE)[:, None], out=used)
    np.exp(used, out=used)
    return weights


def cumulative_blocks(weights: np.ndarray) -> np.ndarray:
    """[R, num_blocks] float64: weight of all blocks up to and including each."""
    return np.cumsum(_in_blocks(weights).sum(axis=2), axis=1, dtype=np.float64)


def draw(weights: np.ndarray, cumulative: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Choose token i with probability weights[:, i] / sum; never one of weight 0. cumulative: result of
    `cumulative_blocks`; uniforms: [R] float64 in (0, 1). Returns [R] int64."""
    rows = np.arange(len(weights))
    targets = uniforms * cumulative[:, -1]
    block = _first_above(cumulative, targets)
    before = np.where(block > 0, cumulative[rows, block - 1], 0.0)
    inside = np.cumsum(_in_blocks(weights)[rows, block], axis=1, dtype=np.float64)
    return block * BLOCK + _first_above(inside, targets - before)


def _in_blocks(weights: np.ndarray) -> np.ndarray:
    num_rows, size = weights.shape
    return weights.reshape(num_rows, size // BLOCK, BLOCK)


def _first_above(cumulative: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Index of each row's first entry above its target, at most the first that reaches the row's total."""
    above = (cumulative <= targets[:, None]).sum(axis=1)
    last = (cumulative < cumulative[:, -1:]).sum(axis=1)
    return np.minimum(above, last)


def uniform(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Number `indices[i]` of the stream `seeds[i]`, strictly between 0 and 1.

    seeds: [R] uint64; indices: [R] int64. Returns [R] float64, multiples of 2**-53 with 52 random bits.
    """
    state = _mix(seeds + _GOLDEN) + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    bits = _mix(state) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser, a bijection of 64 bits. x: [R] uint64."""
    x = (x ^ (x >> np.uint64(30))) * _MULTIPLIERS[0]
    x = (x ^ (x >> np.uint64(27))) * _MULTIPLIERS[1]
    return x ^ (x >> np.uint64(31))
