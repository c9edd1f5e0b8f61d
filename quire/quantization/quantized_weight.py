"""Operations common to quantised matrices of every format."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Self

import torch

from quire.errors import ModelLoadError

BLOCK_ELEMENTS = 2**20
"""Weights dequantised at once: 4 MiB of working memory."""


class QuantizedWeight(ABC):
    """Checkpoint's matrix of small numbers with scales for groups of input features, as loaders pass it; in some
    formats also a stack of such matrices, one per expert of a layer."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(output rows N, input features K); of a stack (experts, N, K)."""

    @abstractmethod
    def __getitem__(self, which: int | slice | torch.Tensor) -> Self:
        """Some output rows, or matrices of a stack; a view unless selected one by one."""

    @abstractmethod
    def columns(self, start: int, length: int) -> Self:
        """View of some input features, fewer than all. Raises ModelLoadError if the part cuts through a group."""

    @abstractmethod
    def dequantize(self) -> torch.Tensor:
        """[N, K] float32, columns in the order of the input features."""

    def narrow(self, dim: int, start: int, length: int) -> Self:
        """View of [start, start + length) of the first dimension (dim 0) or of a matrix's input features (dim 1).
        Raises ModelLoadError like `columns`."""
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
    """Groups of the input features [start, start + length) of a matrix with `columns` of them. Raises ModelLoadError
    unless the part starts and ends with a group (the last one may be shorter)."""
    end = start + length
    if start % group_size or (end % group_size and end != columns):
        raise ModelLoadError(f"input features {start} to {end} do not start and end with a group of {group_size}")
    return slice(start // group_size, -(-end // group_size))


def check_shape(what: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ModelLoadError, naming `what`, for another dtype or shape."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ModelLoadError(f"{what} must be {list(shape)} of {dtype}, not {list(tensor.shape)} of {tensor.dtype}")


def check_scales(what: str, scales: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ModelLoadError unless the scales are finite float32 of this shape."""
    check_shape(what, scales, torch.float32, shape)
    low, high = torch.aminmax(scales)  # NaN if any element is
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ModelLoadError(f"{what} hold infinities or NaN")
