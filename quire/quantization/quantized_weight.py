"""What all quantised matrices can do, whichever format their values are in."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Self

import torch

from quire.errors import ModelLoadError

BLOCK_ELEMENTS = 2**20
"""Weights that are turned into floating point at once: 4 MiB of working memory."""


class QuantizedWeight(ABC):
    """A matrix of small numbers with scales for groups of input features, as a checkpoint or a quantiser has it; in
    some formats also a stack of such matrices, one for each of a layer's experts."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(output rows N, input features K); of a stack (experts, N, K)."""

    @abstractmethod
    def __getitem__(self, which: int | slice | torch.Tensor) -> Self:
        """These output rows, or of a stack one matrix or some; sharing memory unless they are named one by one."""

    @abstractmethod
    def columns(self, start: int, length: int) -> Self:
        """These input features, fewer than all, sharing memory. Raises ModelLoadError for a part that cuts through a
        group."""

    @abstractmethod
    def dequantize(self) -> torch.Tensor:
        """[N, K] float32, columns in the order of the input features."""

    def narrow(self, dim: int, start: int, length: int) -> Self:
        """The part [start, start + length) of the first dimension (dim 0) or of a matrix's input features (dim 1),
        sharing memory. Raises ModelLoadError as `columns` does."""
        if (start, length) == (0, self.shape[dim]):
            return self
        return self[start : start + length] if dim == 0 else self.columns(start, length)

    def row_blocks(self) -> Iterator[tuple[int, Self]]:
        """(first row, rows from there on) in pieces of about BLOCK_ELEMENTS weights."""
        rows, columns = self.shape
        step = max(1, BLOCK_ELEMENTS // columns)
        for start in range(0, rows, step):
            yield start, self.narrow(0, start, min(step, rows - start))


def group_range(group_size: int, start: int, length: int, columns: int) -> slice:
    """The groups of the input features [start, start + length) of a matrix with `columns` of them. Raises
    ModelLoadError for a part that does not start and end with a group (the last one may be shorter)."""
    end = start + length
    if start % group_size or (end % group_size and end != columns):
        raise ModelLoadError(f"input features {start} to {end} do not start and end with a group of {group_size}")
    return slice(start // group_size, -(-end // group_size))


def check_shape(what: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ModelLoadError for a tensor of another dtype or shape."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ModelLoadError(f"{what} must be {list(shape)} of {dtype}, not {list(tensor.shape)} of {tensor.dtype}")


def check_scales(what: str, scales: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ModelLoadError for scales that are not finite float32 of this shape."""
    check_shape(what, scales, torch.float32, shape)
    low, high = torch.aminmax(scales)  # NaN if any is
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ModelLoadError(f"{what} hold infinities or NaN")
