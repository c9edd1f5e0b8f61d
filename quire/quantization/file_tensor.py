"""Checkpoint tensors that are read in parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

ReadSlice = Callable[[int, int, int], torch.Tensor]
"""(dim, start, length) -> that part of a tensor, dense, in host memory."""


@dataclass(frozen=True, eq=False)
class FileTensor:
    """Tensor in a checkpoint's file, for loading shares of it. shape: the whole tensor. dtype: stored dtype. Reading
    may raise ModelLoadError, and is possible until the next tensor of the file is asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read_whole: Callable[[], torch.Tensor]
    read_slice: ReadSlice
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def t(self) -> FileTensor:
        """Transposed matrix; nothing is read."""
        return replace(self, shape=self.shape[::-1], transposed=not self.transposed)

    def read(self) -> torch.Tensor:
        tensor = self.read_whole()
        return tensor.t() if self.transposed else tensor

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Read only the part [start, start + length) of a dimension."""
        if (start, length) == (0, self.shape[dim]):
            return self.read()
        if self.transposed:
            return self.read_slice(1 - dim, start, length).t()
        return self.read_slice(dim, start, length)
