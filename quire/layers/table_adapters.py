"""Low-rank adapters of a table of embeddings, in torch."""

from __future__ import annotations

import torch

from quire.kernels.matmul import row_linear
from quire.layers.adapters import (
    AdapterPlace,
    Adapters,
    AdapterStack,
    AdapterStorage,
    LowRank,
    Part,
    SlotMatrices,
    StepSlots,
)


class TableAdapters(SlotMatrices[LowRank]):
    """Adapters of an embedding, by slot. `LowRank.a`: [rows of the table, rank]."""

    def add(self, token_ids: torch.Tensor, y: torch.Tensor, slots: StepSlots) -> torch.Tensor:
        """y, overwritten, plus the results for token_ids, [T]."""
        for rows, found in self._by_slot(y, slots):
            inner = found.a[token_ids[rows]].to(y.dtype) * found.scale
            y[rows] += row_linear(inner, found.b[0].to(y.dtype), None)
        return y

    def add_recorded(self, y: torch.Tensor) -> torch.Tensor:
        running = self._adapters.running
        assert running is not None, "a run brings its slots"
        assert running.token_ids is not None, "and its tokens"
        return self.add(running.token_ids, y, running)


class TablePlace(AdapterPlace):
    """Target of an embedding's adapters, whole on each rank."""

    names = ("embedding_A", "embedding_B")

    def __init__(self, num_rows: int, size: int, adapters: Adapters) -> None:
        self._num_rows, self._size = num_rows, size
        self.stack = AdapterStack(num_rows, 0, num_rows, [Part(size, 0, size)], [range(1)])
        self.table = TableAdapters(adapters) if adapters.storage.adds_in_torch else None
        if self.table is None:
            adapters.add_layer(self.stack, bool)

    @property
    def added(self) -> TableAdapters | AdapterStack:
        return self.stack if self.table is None else self.table

    @property
    def shape(self) -> tuple[int, int]:
        return self._size, self._num_rows

    @property
    def local_elements(self) -> int:
        return self._size + self._num_rows

    def load(self, storage: AdapterStorage, slot: int, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        if self.table is None:
            storage.load(self.stack, slot, 0, LowRank(a, [b], scale))
        else:
            own_a, own_b = a.t().to(storage.dtype).contiguous(), b.to(storage.dtype)
            self.table.load(slot, LowRank(own_a, [own_b], scale))
