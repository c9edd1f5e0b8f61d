"""top-k, top-p and min-p as one lowest kept weight per row.

Equal weights are kept or removed together (so more than k tokens may stay), and the result does not depend on their
order.
"""

from __future__ import annotations

import numpy as np

FIRST_LOOK = 1024
"""Largest weights that rows with top-p but no top-k try first."""


def apply_filters(
    weights: np.ndarray, totals: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray
) -> None:
    """Set the weights of filtered tokens to zero. Arguments: see `lowest_kept`."""
    weights[weights < lowest_kept(weights, totals, top_k, top_p, min_p)[:, None]] = 0


def lowest_kept(
    weights: np.ndarray, totals: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray
) -> np.ndarray:
    """[R], lowest weight that each row keeps.

    weights: [R, vocab_size] float32, not negative, each row's largest is 1; totals: [R] float64, their sums. top_k: [R]
    int64, 0 or less is off. top_p: [R] float64, 1 is off; a share of what top-k leaves. min_p: [R] float32, 0 is off;
    relative to the largest weight. No filter removes the largest weight.
    """
    lowest = min_p.astype(weights.dtype)
    ranked = np.flatnonzero((top_k > 0) | (top_p < 1))
    if ranked.size:
        kept = _lowest_ranked(weights[ranked], totals[ranked], top_k[ranked], top_p[ranked])
        lowest[ranked] = np.maximum(lowest[ranked], kept)
    return lowest


def _lowest_ranked(weights: np.ndarray, totals: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    vocab_size = weights.shape[1]
    has_top_k = top_k > 0
    width = int(np.where(has_top_k, top_k, FIRST_LOOK).max())
    limits = np.where(has_top_k, np.minimum(top_k, vocab_size), vocab_size)
    lowest, enough = _lowest_of_largest(weights, min(width, vocab_size), totals, limits, top_p)
    if not enough.all():
        flat = np.flatnonzero(~enough)
        lowest[flat], _ = _lowest_of_largest(weights[flat], vocab_size, totals[flat], limits[flat], top_p[flat])
    return lowest


def _lowest_of_largest(
    weights: np.ndarray, width: int, totals: np.ndarray, limits: np.ndarray, top_p: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(smallest weights that top-k and top-p keep, found among the `width` largest, [R]; True where these suffice,
    [R])."""
    vocab_size = weights.shape[1]
    largest = np.partition(weights, vocab_size - width, axis=1)[:, vocab_size - width :]
    largest.sort(axis=1)
    largest = largest[:, ::-1]
    cumulative = np.cumsum(largest, axis=1, dtype=np.float64)
    rows = np.arange(len(weights))
    last = np.minimum(limits, width) - 1
    mass = np.where(limits < vocab_size, cumulative[rows, last], totals)
    # The token that reaches the share is kept: those that stay below it, and one more.
    num_below = (cumulative < (top_p * mass)[:, None]).sum(axis=1)
    last_kept = np.where(top_p < 1, np.minimum(num_below, last), last)
    enough = (limits <= width) | (num_below < width)
    return largest[rows, last_kept], enough
