"""Transformers modules with a common input, computed together at the first call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quire.models.eager_calls import Compute


@dataclass(slots=True)
class Columns:
    """Part of a shared result: columns start .. start + width (width None: all). is_whole: they must be contiguous."""

    result: int
    start: int = 0
    width: int | None = None
    is_whole: bool = True


class SharedInput:
    """Results of several modules for one input, until each is taken. compute: computes all."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._x: torch.Tensor | None = None
        self._results: Sequence[torch.Tensor] = ()
        self._parts: list[torch.Tensor] = []
        """Part for each place, for inputs of shape `_shape`."""
        self._shape: Sequence[int] = ()
        self._columns: list[Columns] = []
        self._left: set[int] = set()

    def add_columns(self, columns: Columns) -> int:
        """Register columns that a Taker wants. Returns the place to take them from."""
        self._columns.append(columns)
        return len(self._columns) - 1

    def put(self, x: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
        """Store the results. x is kept alive until all results are taken."""
        self._x, self._results, self._parts = x, results, []
        self._left = set(range(len(self._columns)))

    def take_result(self, place: int, x: torch.Tensor) -> torch.Tensor:
        """Result of one module for x, [..., features] -> [..., width]."""
        kept = self._x
        if kept is None or place not in self._left or not (x is kept or _are_same(x, kept)):
            self.put(x, self._compute(x.reshape(-1, x.shape[-1])))
        shape = x.shape[:-1]
        if not self._parts or shape != self._shape:
            self._parts, self._shape = self._divided(shape), shape
        part = self._parts[place]
        self._left.discard(place)
        if not self._left:
            self.forget()
        return part

    def forget(self) -> None:
        self._x, self._results, self._parts = None, (), []
        self._left.clear()

    def _divided(self, shape: Sequence[int]) -> list[torch.Tensor]:
        results = [result.view(*shape, result.shape[-1]) for result in self._results]
        parts = []
        for columns in self._columns:
            part = results[columns.result]
            if columns.width is not None:
                part = part.narrow(-1, columns.start, columns.width)
            parts.append(part.contiguous() if columns.is_whole else part)
        return parts


def _are_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.numel() == y.numel() and x.is_contiguous() and y.is_contiguous()


class Taker(nn.Module):
    """Stand-in for a module whose result is computed with others'. It skips torch's search for hooks."""

    def __init__(self, shared: SharedInput, columns: Columns) -> None:
        super().__init__()
        self._shared = shared
        self._place = shared.add_columns(columns)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._shared.take_result(self._place, x)


class Producer(nn.Module):
    """Stand-in for a module whose result is others' input; all are computed together. compute: its result, then theirs.
    Skips hooks like `Taker`."""

    def __init__(self, compute: Compute, shared: SharedInput | None) -> None:
        super().__init__()
        self._compute = compute
        self._shared = shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        own, *others = self._compute(x.reshape(-1, x.shape[-1]))
        result = own.contiguous().view(x.shape)
        if self._shared is not None:
            self._shared.put(result, others)
        return result
