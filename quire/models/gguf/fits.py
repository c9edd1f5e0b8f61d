"""Search for the scales of groups of quantised weights. A weight is about scale * code - offset, with integer codes in
a range. Scales yield codes by rounding; codes yield scale and offset by weighted least squares."""

from __future__ import annotations

from typing import NamedTuple

import torch

STRETCHES = 20
"""Number of scales tried, a tenth of a code apart at the largest weight."""
TINY = 1e-30


class Affine(NamedTuple):
    """Fit of M groups. scales, offsets: [M] float32; x is about scale * code - offset."""

    scales: torch.Tensor
    offsets: torch.Tensor


def fit_affine(x: torch.Tensor, weights: torch.Tensor, most: int, *, is_positive: bool) -> Affine:
    """Fit groups' codes from 0 to `most`. x, weights: [M, G] float32. is_positive: offsets must not be negative."""
    low, high = x.amin(1), x.amax(1)
    if is_positive:
        low = low.clamp(max=0.0)
    sums = weights.sum(1), (weights * x).sum(1)
    span = (high - low).clamp(min=TINY)
    best = Affine(span / most, -low)
    least = (weights * (_round((x - low[:, None]) / best.scales[:, None], 0, most) * best.scales[:, None] - x
                        + low[:, None]).square()).sum(1)  # fmt: skip
    for step in range(-STRETCHES // 2, STRETCHES // 2 + 1):
        start = Affine(span / (most + 0.1 * step), -low)
        best, least = _better(x, weights, sums, most, start, (best, least), is_positive)
    for _ in range(2):  # refine the best fit so far
        best, least = _better(x, weights, sums, most, best, (best, least), is_positive)
    return best


def _better(
    x: torch.Tensor,
    weights: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor],
    most: int,
    start: Affine,
    best: tuple[Affine, torch.Tensor],
    is_positive: bool,
) -> tuple[Affine, torch.Tensor]:
    codes = _round((x + start.offsets[:, None]) / start.scales[:, None].clamp(min=TINY), 0, most)
    scales, offsets = _least_squares(codes, x, weights, *sums, is_positive=is_positive)
    error = (weights * (codes * scales[:, None] - offsets[:, None] - x).square()).sum(1)
    found, least = best
    takes = (error < least) & (scales > 0)
    chosen = Affine(torch.where(takes, scales, found.scales), torch.where(takes, offsets, found.offsets))
    return chosen, torch.where(takes, error, least)


def _least_squares(
    codes: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    total: torch.Tensor,
    sum_x: torch.Tensor,
    *,
    is_positive: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and offset for given codes. total, sum_x: sums of the weights and of the weights times x."""
    weighted = weights * codes
    sum_q, sum_qq, sum_xq = weighted.sum(1), (weighted * codes).sum(1), (weighted * x).sum(1)
    determinant = (total * sum_qq - sum_q * sum_q).clamp(min=TINY)
    scales = (total * sum_xq - sum_x * sum_q) / determinant
    offsets = (sum_q * sum_xq - sum_qq * sum_x) / determinant
    if not is_positive:
        return scales, offsets
    is_below = offsets < 0
    return torch.where(is_below, sum_xq / sum_qq.clamp(min=TINY), scales), offsets.clamp(min=0.0)


def fit_symmetric(x: torch.Tensor, weights: torch.Tensor, half: int) -> torch.Tensor:
    """Fitted scales [M], of either sign, for codes from -half to half - 1."""
    largest = x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0]
    best, most = torch.zeros_like(largest), torch.full_like(largest, -1.0)
    starts = [-half - 0.1 * step for step in range(-STRETCHES // 2, STRETCHES // 2 + 1)]
    safe = torch.where(largest == 0, torch.ones_like(largest), largest)
    for start in [*starts, half - 1.0]:
        codes = _round(x * (start / safe)[:, None], -half, half - 1)
        best, most = _stronger(codes, x, weights, best, most)
    for _ in range(2):
        codes = _round(x / torch.where(best == 0, 1.0, best)[:, None], -half, half - 1)
        best, most = _stronger(codes, x, weights, best, most)
    return best


def fit_table(x: torch.Tensor, weights: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Fitted scales [M], of either sign, for codes that index an ascending table of integers."""
    first, last = float(table[0]), float(table[-1])
    by_half = table[nearest(torch.arange(2 * first, 2 * last + 1) / 2, table)]  # faster to look up than to search

    def values(scaled: torch.Tensor) -> torch.Tensor:
        places = (2 * (scaled - first) + 0.5).clamp_(0, len(by_half) - 1).int()
        return by_half.index_select(0, places.view(-1)).view_as(scaled)

    largest = x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0]
    best, most = torch.zeros_like(largest), torch.full_like(largest, -1.0)
    safe = torch.where(largest == 0, torch.ones_like(largest), largest)
    for start in [first + step for step in range(-7, 8)] + [last + step for step in range(-3, 4)]:
        best, most = _stronger(values(x * (start / safe)[:, None]), x, weights, best, most)
    for _ in range(2):
        best, most = _stronger(values(x / torch.where(best == 0, 1.0, best)[:, None]), x, weights, best, most)
    return best


def nearest(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Indices of the nearest numbers in an ascending table."""
    return torch.bucketize(x, (table[1:] + table[:-1]) / 2)


def _stronger(
    values: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, best: torch.Tensor, most: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Better scale, [M], of the best so far and the fit for `values`, and its gain: reduction of the squared error."""
    weighted = weights * values
    sum_xq, sum_qq = (weighted * x).sum(1), (weighted * values).sum(1).clamp(min=TINY)
    gain = sum_xq * sum_xq / sum_qq
    takes = gain > most
    return torch.where(takes, sum_xq / sum_qq, best), torch.where(takes, gain, most)


def fit_factor(scales: torch.Tensor, weights: torch.Tensor, least: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fit a block's scales as a half-precision factor times integers from `least` to `most`. scales, weights: [B,
    groups]. Returns factors [B] float32 and integers [B, groups] with a small weighted squared error."""
    largest = scales.gather(1, scales.abs().argmax(1, keepdim=True))[:, 0]
    factors, error = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    codes = torch.zeros_like(scales)
    ends = [float(most)] if least >= 0 else [float(least), float(most)]
    for end in ends:
        for step in range(-8, 9):
            tried = _half(largest / (end + 0.1 * step))
            found = _round(scales / torch.where(tried == 0, 1.0, tried)[:, None], least, most)
            gained = _half((weights * scales * found).sum(1) / (weights * found * found).sum(1).clamp(min=TINY))
            lost = (weights * (gained[:, None] * found - scales).square()).sum(1)
            takes = lost < error
            factors, error = torch.where(takes, gained, factors), torch.where(takes, lost, error)
            codes = torch.where(takes[:, None], found, codes)
    return factors, codes


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-65504, 65504).half().float()


def _round(x: torch.Tensor, least: float, most: float) -> torch.Tensor:
    return x.round_().clamp_(least, most)
