"""Token and position embeddings, and the projection back to the vocabulary, whose rows the ranks share out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels.value import Indices, Value
from quire.layers.context import LayerContext, WeightSlot, WeightSlots
from quire.quantization.integer_weight import WeightSource
from quire.quantization.interface import LayerLinear, LinearShape


class Embedding:
    """A table of `num_rows` vectors of `size`, stored by `method`. Each rank holds a run of ceil(num_rows / ranks)
    rows; the last ones may hold fewer."""

    def __init__(self, num_rows: int, size: int, method: LayerLinear, context: LayerContext) -> None:
        self.method = method
        self.num_rows = num_rows
        self.context = context
        self.rows_per_rank = -(-num_rows // context.group.size)
        self._first_row = min(num_rows, context.group.rank * self.rows_per_rank)
        self.num_local_rows = min(num_rows, self._first_row + self.rows_per_rank) - self._first_row
        self.shape = LinearShape(size, self.num_local_rows, False, context.dtype, context.device)
        self.parameters = method.create(self.shape)

    def __call__(self, indices: Indices, onto: Value | None = None) -> Value:
        """[T] int64 -> [T, size], the same on every rank, added to `onto` (which is used up) when given."""
        if self.context.group.size == 1:
            return self.method.lookup(self.parameters, indices, onto)
        assert isinstance(indices, torch.Tensor), "native kernels look up whole tables"
        operations = self.context.operations
        rows = operations.all_reduce(self.context.group, self._lookup_local(indices - self._first_row))
        return rows if onto is None else operations.add(onto, rows)

    def slots(self) -> WeightSlots:
        return {
            "weight": WeightSlot(
                (self.num_rows, self.shape.in_features),
                self._load,
                self.method.stored_bytes((self.num_local_rows, self.shape.in_features)),
            )
        }

    def _load(self, tensor: WeightSource) -> None:
        rows = tensor.narrow(0, self._first_row, self.num_local_rows)
        self.method.load_rows(self.parameters, "weight", rows, 0, self.num_local_rows)

    def _lookup_local(self, local: torch.Tensor) -> torch.Tensor:
        """The rows of the indices that this rank holds, zeros for the others'."""
        if not self.num_local_rows:
            return local.new_zeros((len(local), self.shape.in_features), dtype=self.shape.dtype)
        is_local = (local >= 0) & (local < self.num_local_rows)
        rows = self.method.lookup(self.parameters, local * is_local)
        assert isinstance(rows, torch.Tensor), "tensors of tensors"
        return rows.masked_fill(~is_local[:, None], 0)


class VocabularyProjection:
    """Hidden states to logits, with a matrix of its own or the embedding's (tied)."""

    def __init__(self, embedding: Embedding, context: LayerContext, *, tied: bool) -> None:
        self.tied = tied
        self._operations = context.operations
        size = embedding.shape.in_features
        self._table = embedding if tied else Embedding(embedding.num_rows, size, embedding.method, context)

    @property
    def input_size(self) -> int:
        """Elements of a hidden state that it takes."""
        return self._table.shape.in_features

    def __call__(self, hidden: Value) -> Value:
        """[R, size] -> [R, vocabulary], as `Operations.upcast_logits` gives it."""
        table, group = self._table, self._table.context.group
        logits = table.method.apply(table.parameters, hidden)
        if group.size > 1:
            assert isinstance(logits, torch.Tensor), "native kernels multiply by whole tables"
            padded = F.pad(logits, (0, table.rows_per_rank - table.num_local_rows))
            logits = group.all_gather(padded, dim=-1)[:, : table.num_rows]
        return self._operations.upcast_logits(logits)

    def slots(self) -> WeightSlots:
        """None when tied: the embedding loads the matrix."""
        return {} if self.tied else self._table.slots()
