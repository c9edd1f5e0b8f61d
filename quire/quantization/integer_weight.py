"""Matrix of small integers with scales: common form of checkpoints and quantisers with integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch

from quire.errors import ModelLoadError
from quire.quantization.file_tensor import FileTensor
from quire.quantization.quantized_weight import QuantizedWeight, check_scales, group_range

VALUE_DTYPES = {4: torch.uint8, 8: torch.int8}
MAX_UINT4 = 15


@dataclass(frozen=True, eq=False)
class IntegerWeight(QuantizedWeight):
    """w[n, k] = scales[n, g] * values[n, k] + offsets[n, g] with g = k // group_size, in float32.

    values: [N, K], uint8 from 0 to 15 (bits = 4) or int8 (bits = 8). group_size: divides K (K itself: one scale per
    output row). scales, offsets: [N, K / group_size] float32; offsets may be None (all zero) for 8 bits only.
    column_order: [K] int32, a permutation, or None: column k of `values` belongs to input feature column_order[k].

    Raises ModelLoadError for parts that do not fit, values out of range, and infinite scales and offsets.
    """

    values: torch.Tensor
    bits: int
    group_size: int
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    column_order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self._check_values()
        columns = self.shape[1]
        if self.group_size < 1 or columns % self.group_size:
            raise ModelLoadError(f"groups of {self.group_size} do not divide the {columns} input features")
        check_scales("scales", self.scales, (self.shape[0], self.num_groups))
        if self.offsets is not None:
            check_scales("offsets", self.offsets, (self.shape[0], self.num_groups))
        elif self.bits == 4:
            raise ModelLoadError("4-bit weights need offsets: their values are 0 to 15")
        if self.column_order is not None:
            self._check_order(self.column_order)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def num_groups(self) -> int:
        return self.shape[1] // self.group_size

    @property
    def has_half_scales(self) -> bool:
        """True if float16 holds all scales and offsets exactly."""
        numbers = (self.scales,) if self.offsets is None else (self.scales, self.offsets)
        return all(torch.equal(each.half().float(), each) for each in numbers)

    def __getitem__(self, which: int | slice | torch.Tensor) -> Self:
        offsets = None if self.offsets is None else self.offsets[which]
        return replace(self, values=self.values[which], scales=self.scales[which], offsets=offsets)

    def columns(self, start: int, length: int) -> Self:
        """Also raises ModelLoadError if a column_order puts the columns apart."""
        if self.column_order is not None:
            raise ModelLoadError("a matrix whose columns are reordered (act-order) cannot be split by input features")
        values = self.values.narrow(1, start, length)
        if self.num_groups == 1:
            return replace(self, values=values, group_size=length)
        groups = group_range(self.group_size, start, length, self.shape[1])
        offsets = None if self.offsets is None else self.offsets[:, groups]
        return replace(self, values=values, scales=self.scales[:, groups], offsets=offsets)

    def dequantize(self) -> torch.Tensor:
        rows, columns = self.shape
        grid = self.values.reshape(rows, self.num_groups, self.group_size).float()
        grid *= self.scales.unsqueeze(-1)
        if self.offsets is not None:
            grid += self.offsets.unsqueeze(-1)
        weight = grid.view(rows, columns)
        if self.column_order is None:
            return weight
        ordered = torch.empty_like(weight)
        ordered[:, self.column_order.long()] = weight
        return ordered

    def _check_values(self) -> None:
        expected = VALUE_DTYPES.get(self.bits)
        if expected is None:
            raise ModelLoadError(f"{self.bits}-bit weights are not supported (4 and 8 are)")
        if self.values.dim() != 2 or self.values.dtype != expected or 0 in self.values.shape:
            raise ModelLoadError(
                f"values of {self.bits} bits must be a matrix of {expected}, not {list(self.values.shape)} of "
                f"{self.values.dtype}"
            )
        if self.bits == 4 and int(self.values.max()) > MAX_UINT4:
            raise ModelLoadError(f"4-bit values must lie in 0 to {MAX_UINT4}, not {int(self.values.max())}")

    def _check_order(self, order: torch.Tensor) -> None:
        columns = self.shape[1]
        if tuple(order.shape) != (columns,) or order.dtype != torch.int32:
            raise ModelLoadError(
                f"column_order must be [{columns}] of torch.int32, not {list(order.shape)} of {order.dtype}"
            )
        if not torch.equal(order.sort().values, torch.arange(columns, dtype=torch.int32)):
            raise ModelLoadError(f"column_order does not name each of the {columns} input features once")


WeightTensor = torch.Tensor | QuantizedWeight
"""Matrix of a checkpoint: a plain tensor, or quantised."""

WeightSource = WeightTensor | FileTensor
"""WeightTensor, or its place in a file."""

LoadWeight = Callable[[WeightSource], object]


def copy_into(target: torch.Tensor, source: WeightSource) -> None:
    """Fill a plain tensor of any floating dtype with a tensor of the same shape, dequantised block by block."""
    if isinstance(source, FileTensor):
        source = source.read()
    if isinstance(source, torch.Tensor):
        target.copy_(source)
        return
    assert tuple(target.shape) == source.shape, "a slot takes a matrix of its own shape"
    for start, block in source.row_blocks():
        target[start : start + block.shape[0]].copy_(block.dequantize())
