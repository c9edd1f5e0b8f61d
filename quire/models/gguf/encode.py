"""Encoding as GGUF blocks, the inverse of blocks.py. Encoders map blocks and weights of their errors, [B, values]
float32, to [B, bytes] uint8. Scales are searched (fits.py) and rounded as stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import ModelLoadError
from quire.models.gguf.block_format import Bytes
from quire.models.gguf.fits import fit_affine, fit_factor, fit_symmetric, fit_table, nearest
from quire.models.gguf.grid_blocks import NONLINEAR
from quire.utils.gguf import BLOCK_TYPES, BlockType

TYPES: Mapping[str, BlockType] = {block.name: block for block in BLOCK_TYPES.values()}
NUMBERS: Mapping[str, int] = {block.name: number for number, block in BLOCK_TYPES.items()}
"""Type number by name."""
WORKING_VALUES = 2**17
"""Weights searched at once."""
_LARGEST_HALF = 65504.0
_TABLE = torch.from_numpy(NONLINEAR).float()


def encode(
    rows: torch.Tensor, type_name: str, importance: torch.Tensor | None = None, pool: Executor | None = None
) -> Bytes:
    """Encode a matrix for `write_gguf`: rows [N, K] of any floating dtype -> [N, bytes of a row]. importance: [K]
    float32, weight of each column's error (mean square of its inputs); None: equal. pool: runs the work. Raises
    ModelLoadError for infinities, NaN, and values outside the format."""
    block, encoder = TYPES[type_name], _ENCODERS[type_name]
    num_rows, columns = rows.shape
    out = np.empty((num_rows, columns // block.values * block.num_bytes), dtype=np.uint8)
    step = max(1, WORKING_VALUES // columns)

    def write(first: int) -> None:
        some = rows[first : first + step].float()
        if not bool(torch.isfinite(some).all()):
            raise ModelLoadError("it holds infinities or NaN, which cannot be quantised")
        counts = None if importance is None else importance.expand(len(some), -1).reshape(-1, block.values)
        encoded = encoder(some.reshape(-1, block.values), counts)
        out[first : first + step] = encoded.reshape(len(some), -1)

    for _ in (map if pool is None else pool.map)(write, range(0, num_rows, step)):
        pass
    return out


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor | None], Bytes]:
    def store(x: torch.Tensor, _counts: torch.Tensor | None) -> Bytes:
        stored = x.to(dtype).contiguous()
        if not bool(torch.isfinite(stored).all()):
            raise ModelLoadError(f"it holds numbers that are too large for {str(dtype).removeprefix('torch.')}")
        found: Bytes = stored.view(torch.uint8).numpy()
        return found

    return store


def _q8_0(x: torch.Tensor, _counts: torch.Tensor | None) -> Bytes:
    scales = _halves(x.abs().amax(1) / 127)
    return _joined(scales, _codes(x, scales, -127, 127).to(torch.int8))


def _q4_k(x: torch.Tensor, counts: torch.Tensor | None) -> Bytes:
    head, codes = _affine_blocks(x, counts, 15)
    return _joined(head, _runs(codes))


def _q5_k(x: torch.Tensor, counts: torch.Tensor | None) -> Bytes:
    head, codes = _affine_blocks(x, counts, 31)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((codes >> 4).unflatten(1, (8, 32)) << shifts).sum(1, dtype=torch.uint8)
    return _joined(head, fifth, _runs(codes & 15))


def _affine_blocks(x: torch.Tensor, counts: torch.Tensor | None, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First 16 bytes of Q4_K and Q5_K blocks, [B, 16], and codes [B, 256] uint8."""
    groups = x.reshape(-1, 32)
    weights = _weights(x, counts, 32)
    found = fit_affine(groups, weights, most, is_positive=True)
    totals = weights.sum(1).view(-1, 8)
    factor, scales = fit_factor(found.scales.view(-1, 8), totals, 0, 63)
    subtrahend, offsets = fit_factor(found.offsets.view(-1, 8), totals, 0, 63)
    steps = (factor[:, None] * scales).view(-1, 1)
    shifted = groups + (subtrahend[:, None] * offsets).view(-1, 1)
    codes = (shifted / torch.where(steps == 0, 1.0, steps)).round_().clamp_(0, most).mul_(steps != 0)
    return torch.cat((_bytes(factor), _bytes(subtrahend), _six_bits(scales, offsets)), dim=1), codes.byte().view_as(x)


def _six_bits(scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Pack two [B, 8] of values 0 to 63 -> [B, 12], the inverse of `blocks._group_grid`."""
    first, second = scales.byte(), offsets.byte()
    return torch.cat(
        (
            first[:, :4] | first[:, 4:] >> 4 << 6,
            second[:, :4] | second[:, 4:] >> 4 << 6,
            first[:, 4:] & 15 | (second[:, 4:] & 15) << 4,
        ),
        dim=1,
    )


def _q6_k(x: torch.Tensor, counts: torch.Tensor | None) -> Bytes:
    groups, weights = x.reshape(-1, 16), _weights(x, counts, 16, is_affine=False)
    found = fit_symmetric(groups, weights, 32).view(-1, 16)
    factor, scales = fit_factor(found, weights.sum(1).view(-1, 16), -128, 127)
    steps = (factor[:, None] * scales).view(-1, 1)
    codes = ((groups / torch.where(steps == 0, 1.0, steps)).round_().clamp_(-32, 31) + 32).byte().view(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    lower = (low[:, :, :2] | low[:, :, 2:] << 4).flatten(1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    upper = (high << shifts).sum(2, dtype=torch.uint8).flatten(1)
    return _joined(lower, upper, scales.to(torch.int8), factor)


def _iq4_xs(x: torch.Tensor, counts: torch.Tensor | None) -> Bytes:
    groups, weights = x.reshape(-1, 32), _weights(x, counts, 32, is_affine=False)
    found = fit_table(groups, weights, _TABLE).view(-1, 8)
    factor, scales = fit_factor(found, weights.sum(1).view(-1, 8), -32, 31)
    steps = (factor[:, None] * scales).view(-1, 1)
    codes = nearest(groups / torch.where(steps == 0, 1.0, steps), _TABLE).byte()
    six = (scales + 32).to(torch.int32)
    upper = ((six >> 4) << torch.arange(0, 16, 2, dtype=torch.int32)).sum(1, dtype=torch.int32)
    low = (six & 15).byte()
    both = torch.stack((upper & 255, upper >> 8), dim=1).byte()
    return _joined(factor, both, low[:, 0::2] | low[:, 1::2] << 4, _nibbles(codes).view(-1, 128))


def _iq4_nl(x: torch.Tensor, counts: torch.Tensor | None) -> Bytes:
    scales = _halves(fit_table(x, _weights(x, counts, 32, is_affine=False), _TABLE))
    codes = nearest(x / torch.where(scales == 0, 1.0, scales)[:, None], _TABLE).byte()
    return _joined(scales, _nibbles(codes))


def _q5_0(x: torch.Tensor, counts: torch.Tensor | None) -> Bytes:
    scales = _halves(fit_symmetric(x, _weights(x, counts, 32), 16))
    codes = (_codes(x, scales, -16, 15) + 16).byte()
    return _joined(scales, _fifth_bits(codes), _nibbles(codes & 15))


def _q5_1(x: torch.Tensor, counts: torch.Tensor | None) -> Bytes:
    found = fit_affine(x, _weights(x, counts, 32), 31, is_positive=False)
    scales, offsets = _halves(found.scales), _halves(-found.offsets)
    codes = _codes(x - offsets[:, None], scales, 0, 31).byte()
    return _joined(scales, offsets, _fifth_bits(codes), _nibbles(codes & 15))


def _weights(x: torch.Tensor, counts: torch.Tensor | None, size: int, *, is_affine: bool = True) -> torch.Tensor:
    """Weight of each value's error, [groups, size]: grows with the value, and with `counts` if known."""
    groups = x.reshape(-1, size)
    if counts is not None:
        spread = 2 * x.square().mean(1, keepdim=True)
        return (counts * (spread + x.square()).sqrt()).reshape(-1, size)
    if not is_affine:
        return groups.square()
    return groups.square().mean(1, keepdim=True).sqrt() + groups.abs()


def _codes(x: torch.Tensor, scales: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """[B, n], scales [B] -> nearest integers; 0 where the scale is 0."""
    return (x / torch.where(scales == 0, torch.inf, scales)[:, None]).round_().clamp_(least, most)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, :16] | codes[:, 16:] << 4


def _runs(codes: torch.Tensor) -> torch.Tensor:
    runs = codes.view(-1, 4, 2, 32)
    return (runs[:, :, 0] | runs[:, :, 1] << 4).flatten(1)


def _fifth_bits(codes: torch.Tensor) -> torch.Tensor:
    return ((codes >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)).sum(2, dtype=torch.uint8)


def _halves(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_LARGEST_HALF, _LARGEST_HALF).half().float()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """[B] float32 representable in half precision -> [B, 2] bytes; bytes [B, n] unchanged."""
    return x.half().unsqueeze(1).view(torch.uint8) if x.is_floating_point() else x.view(torch.uint8)


def _joined(*parts: torch.Tensor) -> Bytes:
    found: npt.NDArray[np.uint8] = torch.cat([_bytes(part) for part in parts], dim=1).numpy()
    return found


_ENCODERS: Mapping[str, Callable[[torch.Tensor, torch.Tensor | None], Bytes]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    "IQ4_NL": _iq4_nl,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
}
