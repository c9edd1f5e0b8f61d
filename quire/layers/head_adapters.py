"""Low-rank adapters of matrices per head, in torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.kernels.matmul import row_head_linear
from quire.layers.adapters import AdapterPlace, AdapterStack, AdapterStorage, SlotMatrices, StepSlots


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """One adapter's matrices per head. a: [heads, rank, inputs]; b: [heads, outputs, rank]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


class HeadAdapters(SlotMatrices[HeadMatrices]):
    """Adapters of a rank's matrices per head, by slot."""

    def add(self, x: torch.Tensor, y: torch.Tensor, slots: StepSlots) -> torch.Tensor:
        """y, overwritten, plus the adapters' results. x: [T, heads * inputs], y: [T, heads * outputs]."""
        for rows, found in self._by_slot(x, slots):
            inner = row_head_linear(x[rows], found.a.to(x.dtype)) * found.scale
            y[rows] += row_head_linear(inner, found.b.to(x.dtype))
        return y

    def add_recorded(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert self._adapters.running is not None, "a run brings its slots"
        return self.add(x, y, self._adapters.running)


class ExpansionPlace(AdapterPlace):
    """Target of adapters of the absorbed matrix that expands latents."""

    def __init__(
        self, sizes: tuple[int, int, int], heads: range, num_heads: int, keys: HeadAdapters, values: HeadAdapters
    ) -> None:
        """sizes: a latent's, a head's key's and its value's. heads: this rank's, of num_heads."""
        self._sizes, self._heads, self._num_heads = sizes, heads, num_heads
        self._keys, self._values = keys, values

    @property
    def stacks(self) -> Sequence[AdapterStack]:
        return ()

    @property
    def shape(self) -> tuple[int, int]:
        rank, key_dim, value_dim = self._sizes
        return self._num_heads * (key_dim + value_dim), rank

    @property
    def local_elements(self) -> int:
        rank, key_dim, value_dim = self._sizes
        return rank + len(self._heads) * (key_dim + value_dim)

    def load(self, storage: AdapterStorage, slot: int, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        a, b = a.to(storage.dtype), b.to(storage.dtype)
        _, *sizes = self._sizes
        own = b.unflatten(0, (self._num_heads, -1))[self._heads.start : self._heads.stop]
        keys, values = own.split(sizes, dim=1)
        count = len(self._heads)
        self._keys.load(slot, HeadMatrices(keys.transpose(1, 2), a.t().expand(count, -1, -1), scale))
        self._values.load(slot, HeadMatrices(a.expand(count, -1, -1), values, scale))
