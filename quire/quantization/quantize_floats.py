"""Rounding of a floating-point matrix to FP8 or MXFP4, without activations."""

from __future__ import annotations

import torch

from quire.errors import ModelLoadError
from quire.quantization.float_weight import E2M1_VALUES, EXPONENT_BIAS, MX_GROUP, Float4Weight, Float8Weight
from quire.quantization.quantized_weight import BLOCK_ELEMENTS

LARGEST_E4M3 = 448.0
E2M1_EXPONENT = 2
"""Exponent of the largest e2m1 number, 6 = 1.5 * 2 ** 2."""
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints of neighbouring e2m1 magnitudes. A tie goes to the even code."""
SIGN_CODE = 8


def quantize_float8(tensor: torch.Tensor, *, name: str | None = None) -> Float8Weight:
    """Round [N, K] of any floating dtype, with a scale per row from its largest magnitude; the same bits on each
    device. The result stays on the tensor's device. name: the tensor's name for errors. Raises ModelLoadError for
    infinities and NaN."""
    rows, columns = tensor.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=tensor.device)
    scales = torch.empty(rows, 1, device=tensor.device)
    step = max(1, BLOCK_ELEMENTS // columns)
    for start in range(0, rows, step):
        block = _finite(tensor[start : start + step], name)
        peak = block.abs().amax(1, keepdim=True)
        scale = torch.where(peak > 0, peak / LARGEST_E4M3, 1.0)
        values[start : start + step] = (block / scale).clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(values.dtype)
        scales[start : start + step] = scale
    return Float8Weight(values, scales, columns)


def quantize_mxfp4(tensor: torch.Tensor, *, name: str | None = None) -> Float4Weight:
    """Round [N, K] of any floating dtype in groups of 32 (the last may be shorter). A group's exponent is that of its
    largest magnitude, which clips values above 6, or the next one if its squared error is smaller. name: for errors.
    Raises ModelLoadError for infinities and NaN."""
    rows, columns = tensor.shape
    groups = -(-columns // MX_GROUP)
    pairs = torch.empty(rows, groups * MX_GROUP // 2, dtype=torch.uint8)
    scale_codes = torch.empty(rows, groups, dtype=torch.uint8)
    step = max(1, BLOCK_ELEMENTS // columns)
    for start in range(0, rows, step):
        block = _finite(tensor[start : start + step], name)
        padded = torch.nn.functional.pad(block, (0, groups * MX_GROUP - columns)).view(-1, groups, MX_GROUP)
        exponents, codes = _mxfp4(padded)
        scale_codes[start : start + step] = (exponents.squeeze(-1) + EXPONENT_BIAS).to(torch.uint8)
        flat = codes.flatten(1)
        pairs[start : start + step] = flat[:, 0::2] | flat[:, 1::2] << 4
    return Float4Weight(pairs[:, : -(-columns // 2)].contiguous(), scale_codes, columns)


def _mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, G, 32] -> exponents [N, G, 1] and codes [N, G, 32] uint8."""
    peak = x.abs().amax(-1, keepdim=True)
    whole = torch.frexp(peak).exponent - 1 - E2M1_EXPONENT
    lower = whole.clamp(-EXPONENT_BIAS, EXPONENT_BIAS)
    upper = (whole + 1).clamp(-EXPONENT_BIAS, EXPONENT_BIAS)
    (first, first_error), (second, second_error) = _rounded(x, lower), _rounded(x, upper)
    takes_upper = second_error < first_error
    return torch.where(takes_upper, upper, lower), torch.where(takes_upper, second, first)


def _rounded(x: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = torch.ldexp(x.double().abs(), -exponents)
    middles = torch.tensor(MIDDLES, dtype=torch.float64)
    # The even code next to a middle is the lower one for every second middle, starting with the first.
    below, above = torch.bucketize(size, middles), torch.bucketize(size, middles, right=True)
    codes = torch.where(below % 2 == 0, below, above)
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)[codes]
    error = torch.ldexp(size - values, exponents).square().sum(-1, keepdim=True)
    return (codes + SIGN_CODE * (x < 0)).to(torch.uint8), error


def _finite(block: torch.Tensor, name: str | None) -> torch.Tensor:
    wide = block.float().contiguous()
    if not bool(torch.isfinite(wide).all()):
        named = "" if name is None else f"tensor {name!r}: "
        raise ModelLoadError(f"{named}holds infinities or NaN, which cannot be quantised")
    return wide
