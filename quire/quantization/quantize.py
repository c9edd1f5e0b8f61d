"""Rounding of a floating-point matrix to integers, without activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from quire.errors import ModelLoadError
from quire.quantization.integer_weight import MAX_UINT4, IntegerWeight

GROUP_SIZES = (128, 64, 32)
MAX_INT8 = 127
CLIPPING = (1.0, 0.87, 0.75)
"""Shares of a group's range at which the search for 4 bits starts."""
NUDGES = (
    (1.06, 0.0), (0.94, 0.0), (1.0, 0.3), (1.0, -0.3), (1.03, 0.0), (0.97, 0.0), (1.0, 0.15), (1.0, -0.15),
)  # fmt: skip
"""Changes tried next on the best so far: (factor of the step, shift in steps). On trained weights they lower the
squared error by a further 7 %."""
LEAST_HALF_STEP = 2.0**-18
MOST_STEPS_FROM_ZERO = 256
"""Least step, and most steps in an offset, that float16 keeps well: a step of 64 units or more, an offset off by a
sixteenth of a step."""
WORKING_ELEMENTS = 2**20
"""Weights searched at once."""


class FittedGroups(NamedTuple):
    """M groups of G weights rounded to 4 bits. values: [M, G], 0 to 15. steps, offsets, means: [M, 1] float32: weight =
    offset + step * value, and the mean of the values."""

    values: torch.Tensor
    steps: torch.Tensor
    offsets: torch.Tensor
    means: torch.Tensor


Fit = Callable[[torch.Tensor], FittedGroups | None]
"""Rounds groups of weights, [M, G] float32, to 4 bits; returns None for infinities or NaN."""


def fitting_group_size(in_features: int, requested: int) -> int:
    """Largest of 128, 64 and 32 that is at most `requested` and divides `in_features`. Raises ModelLoadError, with the
    arithmetic, if none does."""
    for size in GROUP_SIZES:
        if size <= requested and in_features % size == 0:
            return size
    smallest = GROUP_SIZES[-1]
    if requested < smallest:
        raise ModelLoadError(f"groups of {requested} are not supported: the smallest size is {smallest}")
    count, left = divmod(in_features, smallest)
    raise ModelLoadError(
        f"{in_features} input features are {count} groups of {smallest} and {left} left over: 4-bit weights need "
        f"a multiple of {smallest}"
    )


def quantize_rows(
    tensor: torch.Tensor, bits: int, group_size: int | None, *, name: str | None = None, fit: Fit | None = None
) -> IntegerWeight:
    """Quantise [N, K] of any floating dtype. 8 bits: symmetric, one scale per group from its largest magnitude
    (group_size None: per row). 4 bits: scale and offset per group of `fitting_group_size(K, group_size)`, chosen for a
    small squared error and rounded to float16 where allowed. name: for errors (None: the caller adds it). fit: 4-bit
    rounding (None: `fit_groups`). Raises ModelLoadError for infinities, NaN and sizes that do not fit."""
    assert tensor.dim() == 2, "only matrices are quantised"
    assert bits == 8 or group_size is not None, "4-bit weights are quantised in groups"
    rows, columns = tensor.shape
    try:
        size = columns if group_size is None else fitting_group_size(columns, group_size)
        values = torch.empty(rows, columns, dtype=torch.int8 if bits == 8 else torch.uint8, device=tensor.device)
        scales = torch.empty(rows, columns // size, device=tensor.device)
        offsets = None if bits == 8 else torch.empty_like(scales)
        for start, stop in _row_blocks(rows, columns):
            groups = tensor[start:stop].float().reshape(-1, size)
            whole, scale, offset = _int8(groups) if bits == 8 else _int4(groups, fit or fit_groups)
            values[start:stop] = whole.view(stop - start, columns)
            scales[start:stop] = scale.view(stop - start, -1)
            if offsets is not None:
                offsets[start:stop] = offset.view(stop - start, -1)
        return IntegerWeight(values, bits, size, scales, offsets)
    except ModelLoadError as error:
        raise ModelLoadError(error.message if name is None else f"tensor {name!r}: {error.message}") from None


def _row_blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, WORKING_ELEMENTS // columns)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _peaks(groups: torch.Tensor) -> torch.Tensor | None:
    """[M, 1]: largest magnitude in each row of [M, G], 1 if all are zero. None if some are not finite."""
    peak = groups.abs().amax(1, keepdim=True)
    return torch.where(peak > 0, peak, 1.0) if bool(torch.isfinite(peak).all()) else None


def _not_finite() -> ModelLoadError:
    return ModelLoadError("holds infinities or NaN, which cannot be quantised")


def _int8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[M, G] -> values of -127 to 127, scales and (zero) offsets [M, 1]."""
    if (peak := _peaks(groups)) is None:
        raise _not_finite()
    values = (groups / peak).mul_(MAX_INT8).round_()
    return values, peak / MAX_INT8, torch.zeros_like(peak)


def _int4(groups: torch.Tensor, fit: Fit) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[M, G] -> values of 0 to 15, scales and offsets [M, 1]."""
    if (found := fit(groups)) is None:
        raise _not_finite()
    return found.values, *_in_halves(found)


def fit_groups(groups: torch.Tensor) -> FittedGroups | None:
    """Round groups by search: a candidate is a step and a start, to which a group is rounded, then fitted to the
    rounded values by least squares. The smallest squared error wins, per group. None: a weight is not finite."""
    if (peak := _peaks(groups)) is None:
        return None
    x = groups / peak
    mean = x.mean(1, keepdim=True)
    x -= mean
    low, high = torch.aminmax(x, dim=1, keepdim=True)
    best = _fit(x, _round(x, (high - low) / MAX_UINT4, low))
    for share in CLIPPING[1:]:
        step = (high - low) * (share / MAX_UINT4)
        best = _better(best, _fit(x, _round(x, step, low * share)))
    for factor, shift in NUDGES:
        step = best.step * factor
        start = best.start + best.step * (shift + (1 - factor) * MAX_UINT4 / 2)
        best = _better(best, _fit(x, _round(x, step, start)))
    values = _round(x, best.step, best.start)
    final = _fit(x, values)
    return FittedGroups(values, final.step * peak, (final.start + mean) * peak, values.mean(1, keepdim=True))


def _in_halves(found: FittedGroups) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps rounded to float16, and offsets fitted to them, if float16 keeps both well."""
    _, steps, offsets, means = found
    half_steps = steps.half().float()
    half_offsets = (offsets + (steps - half_steps) * means).half().float()
    keeps = (steps >= LEAST_HALF_STEP) & (offsets.abs() <= MOST_STEPS_FROM_ZERO * steps)
    keeps &= torch.isfinite(half_steps) & torch.isfinite(half_offsets)
    return torch.where(keeps, half_steps, steps), torch.where(keeps, half_offsets, offsets)


class _Line(NamedTuple):
    """Fitted line x = start + step * value, each [M, 1]. explained: the part of x's sum of squares that it accounts
    for."""

    step: torch.Tensor
    start: torch.Tensor
    explained: torch.Tensor


def _better(first: _Line, second: _Line) -> _Line:
    wins = second.explained > first.explained
    return _Line(*(torch.where(wins, new, old) for new, old in zip(second, first, strict=True)))


def _round(x: torch.Tensor, step: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Nearest of 0 to 15 to (x - start) / step; all 0 if step is 0."""
    per_step = torch.where(step > 0, 1 / step, 0.0)
    return torch.addcmul(-start * per_step, x, per_step).clamp_(0, MAX_UINT4).round_()


def _fit(x: torch.Tensor, values: torch.Tensor) -> _Line:
    mean = values.mean(1, keepdim=True)
    covariance = torch.linalg.vecdot(values, x).unsqueeze(1)
    variance = torch.linalg.vector_norm(values, dim=1, keepdim=True).square() - mean.square() * x.shape[1]
    # Equal values leave a rounding error here, not zero; two different values leave at least 0.5.
    step = torch.where(variance > 0.25, covariance / variance, 0.0)
    return _Line(step, -step * mean, step * covariance)
