"""A matrix of small integers with scales: the common form of all quantised checkpoints and quantisers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from quire.errors import ModelLoadError
from quire.quantization.file_tensor import FileTensor

VALUE_DTYPES = {4: torch.uint8, 8: torch.int8}
MAX_UINT4 = 15
BLOCK_ELEMENTS = 2**20
"""Weights that are turned into floating point at once: 4 MiB of working memory."""


@dataclass(frozen=True, eq=False)
class IntegerWeight:
    """w[n, k] = scales[n, g] * values[n, k] + offsets[n, g] with g = k // group_size, in float32.

    values: [N, K], uint8 from 0 to 15 (bits = 4) or int8 (bits = 8). group_size: divides K (K itself: one scale an
    output row). scales, offsets: [N, K / group_size] float32; offsets may be None (all zero) for 8 bits only.
    column_order: [K] int32, a permutation, or None: column k of `values` belongs to input feature column_order[k].

    The constructor raises ModelLoadError for parts that do not fit together, values out of range, and scales and
    offsets that are not finite.
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
        self._check_grid("scales", self.scales)
        if self.offsets is not None:
            self._check_grid("offsets", self.offsets)
        elif self.bits == 4:
            raise ModelLoadError("4-bit weights need offsets: their values are 0 to 15")
        if self.column_order is not None:
            self._check_order(self.column_order)

    @property
    def shape(self) -> tuple[int, int]:
        """(output rows N, input features K)."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def num_groups(self) -> int:
        """Groups in each row."""
        return self.shape[1] // self.group_size

    def narrow(self, dim: int, start: int, length: int) -> IntegerWeight:
        """The part [start, start + length) of the output rows (dim 0) or of the input features (dim 1), sharing
        memory. Raises ModelLoadError for a part of the features that cuts through a group, or whose columns are not
        side by side because of a column_order."""
        if dim == 0:
            offsets = None if self.offsets is None else self.offsets.narrow(0, start, length)
            return replace(
                self,
                values=self.values.narrow(0, start, length),
                scales=self.scales.narrow(0, start, length),
                offsets=offsets,
            )
        if (start, length) == (0, self.shape[1]):
            return self
        if self.column_order is not None:
            raise ModelLoadError("a matrix whose columns are reordered (act-order) cannot be split by input features")
        if self.num_groups == 1:
            return replace(self, values=self.values.narrow(1, start, length), group_size=length)
        if start % self.group_size or length % self.group_size:
            raise ModelLoadError(
                f"input features {start} to {start + length} do not start and end with a group of {self.group_size}"
            )
        first, count = start // self.group_size, length // self.group_size
        return replace(
            self,
            values=self.values.narrow(1, start, length),
            scales=self.scales.narrow(1, first, count),
            offsets=None if self.offsets is None else self.offsets.narrow(1, first, count),
        )

    def row_blocks(self) -> Iterator[tuple[int, IntegerWeight]]:
        """(first row, rows from there on) in pieces of about BLOCK_ELEMENTS weights."""
        rows, columns = self.shape
        step = max(1, BLOCK_ELEMENTS // columns)
        for start in range(0, rows, step):
            yield start, self.narrow(0, start, min(step, rows - start))

    def dequantize(self) -> torch.Tensor:
        """[N, K] float32, columns in the order of the input features."""
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

    def _check_grid(self, what: str, grid: torch.Tensor) -> None:
        shape = (self.shape[0], self.num_groups)
        if tuple(grid.shape) != shape or grid.dtype != torch.float32:
            raise ModelLoadError(
                f"{what} must be {list(shape)} of torch.float32, not {list(grid.shape)} of {grid.dtype}"
            )
        if not bool(torch.isfinite(grid).all()):
            raise ModelLoadError(f"{what} hold infinities or NaN")

    def _check_order(self, order: torch.Tensor) -> None:
        columns = self.shape[1]
        if tuple(order.shape) != (columns,) or order.dtype != torch.int32:
            raise ModelLoadError(
                f"column_order must be [{columns}] of torch.int32, not {list(order.shape)} of {order.dtype}"
            )
        if not torch.equal(order.sort().values, torch.arange(columns, dtype=torch.int32)):
            raise ModelLoadError(f"column_order does not name each of the {columns} input features once")


WeightTensor = torch.Tensor | IntegerWeight
"""A matrix of a checkpoint: a plain tensor, or quantised."""

WeightSource = WeightTensor | FileTensor
"""The same, or the place where a file has it."""

LoadWeight = Callable[[WeightSource], object]


def copy_into(target: torch.Tensor, source: WeightSource) -> None:
    """Fill a plain tensor of any floating dtype with a tensor of the same shape; an IntegerWeight is dequantised
    block by block."""
    if isinstance(source, FileTensor):
        source = source.read()
    if isinstance(source, torch.Tensor):
        target.copy_(source)
        return
    assert tuple(target.shape) == source.shape, "a slot takes a matrix of its own shape"
    for start, block in source.row_blocks():
        target[start : start + block.shape[0]].copy_(block.dequantize())
