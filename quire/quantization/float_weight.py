"""Matrices of 8-bit and 4-bit floats with scales, as stored.

Formats are OFP8 (e4m3), MXFP4 (e2m1 values, a power of two for 32), NVFP4 (an e4m3 scale for 16 values, a float32
besides).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from quire.errors import ModelLoadError
from quire.quantization.quantized_weight import (
    BLOCK_ELEMENTS,
    QuantizedWeight,
    check_scales,
    check_shape,
    group_range,
)

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MX_GROUP, NV_GROUP = 32, 16
NAN_SIZE = 0x7F
"""E4m3 NaN code, without its sign."""
NAN_EXPONENT = 0xFF
"""E8m0 NaN code."""
EXPONENT_BIAS = 127


@dataclass(frozen=True, eq=False)
class Float8Weight(QuantizedWeight):
    """w[n, k] = scales[n, k // group_size] * values[n, k].

    values: [N, K] float8_e4m3fn. scales: [N, G] float32, G = K / group_size rounded up. Raises ModelLoadError for parts
    that do not fit, and values and scales that are not finite.
    """

    values: torch.Tensor
    scales: torch.Tensor
    group_size: int

    def __post_init__(self) -> None:
        if self.values.dim() != 2 or 0 in self.values.shape:
            raise ModelLoadError(f"values must be a matrix, not {list(self.values.shape)}")
        rows, columns = self.shape
        check_shape("values", self.values, torch.float8_e4m3fn, (rows, columns))
        check_scales("scales", self.scales, (rows, -(-columns // self.group_size)))
        _refuse_nan(self.values, "values")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def __getitem__(self, which: int | slice | torch.Tensor) -> Self:
        return replace(self, values=self.values[which], scales=self.scales[which])

    def columns(self, start: int, length: int) -> Self:
        values = self.values.narrow(1, start, length)
        if self.scales.shape[1] == 1:
            return replace(self, values=values, group_size=length)
        groups = group_range(self.group_size, start, length, self.shape[1])
        return replace(self, values=values, scales=self.scales[:, groups])

    def dequantize(self) -> torch.Tensor:
        scales = self.scales.repeat_interleave(self.group_size, 1)[:, : self.shape[1]]
        return self.values.float().mul_(scales)


@dataclass(frozen=True, eq=False)
class Float4Weight(QuantizedWeight):
    """w[n, k] = E2M1_VALUES[code of k] * scale of its group; or a stack of such matrices, with a leading dimension.

    pairs: [N, K / 2 rounded up] uint8, the first code of two in the lower half. num_columns: K. scale_codes: for MXFP4
    (row_scales is None) [N, K / 32 rounded up] uint8 e8m0 exponents, scale = 2 ** (code - 127); for NVFP4 [N, K / 16
    rounded up], bits of e4m3 numbers, multiplied by row_scales, [N] float32. Raises ModelLoadError for parts that do
    not fit, and infinite scales.
    """

    pairs: torch.Tensor
    scale_codes: torch.Tensor
    num_columns: int
    row_scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.pairs.dim() < 2 or 0 in self.pairs.shape:
            raise ModelLoadError(f"values must be a matrix, not {list(self.pairs.shape)}")
        *rows, columns = self.shape
        check_shape("values", self.pairs, torch.uint8, (*rows, -(-columns // 2)))
        check_shape("scales", self.scale_codes, torch.uint8, (*rows, -(-columns // self.group_size)))
        if self.row_scales is None:
            if bool((self.scale_codes == NAN_EXPONENT).any()):
                raise ModelLoadError("scales hold NaN")
        else:
            check_scales("scales of rows", self.row_scales, tuple(rows))
            _refuse_nan(self.scale_codes, "scales")

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.pairs.shape[:-1], self.num_columns

    @property
    def group_size(self) -> int:
        """Input features per scale."""
        return MX_GROUP if self.row_scales is None else NV_GROUP

    def __getitem__(self, which: int | slice | torch.Tensor) -> Self:
        row_scales = None if self.row_scales is None else self.row_scales[which]
        return replace(self, pairs=self.pairs[which], scale_codes=self.scale_codes[which], row_scales=row_scales)

    def columns(self, start: int, length: int) -> Self:
        groups = group_range(self.group_size, start, length, self.num_columns)
        pairs = self.pairs[:, start // 2 : -(-(start + length) // 2)]
        return replace(self, pairs=pairs, scale_codes=self.scale_codes[:, groups], num_columns=length)

    def dequantize(self) -> torch.Tensor:
        codes = torch.stack((self.pairs & 0xF, self.pairs >> 4), dim=-1).flatten(1)[:, : self.num_columns]
        values = torch.tensor(E2M1_VALUES)[codes.int()]
        return values.mul_(self._scales().repeat_interleave(self.group_size, 1)[:, : self.num_columns])

    def _scales(self) -> torch.Tensor:
        """[N, G] float32."""
        if self.row_scales is None:
            return torch.exp2(self.scale_codes.double() - EXPONENT_BIAS).float()
        return self.scale_codes.view(torch.float8_e4m3fn).float() * self.row_scales.unsqueeze(1)


def _refuse_nan(codes: torch.Tensor, what: str) -> None:
    for block in codes.view(torch.uint8).split(max(1, BLOCK_ELEMENTS // codes.shape[1])):
        if bool(((block & NAN_SIZE) == NAN_SIZE).any()):
            raise ModelLoadError(f"{what} hold NaN")
