"""Token and position embeddings, and the vocabulary projection; ranks share their rows."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.kernels.value import Indices, Value
from quire.layers.context import LayerContext, WeightSlot, WeightSlots
from quire.quantization.integer_weight import WeightSource
from quire.quantization.interface import LinearMethod, LinearShape


class Embedding:
    """Table of `num_rows` vectors of `size`, stored by `method`. Each rank holds ceil(num_rows / ranks) rows, the last
    maybe fewer. Raises ConfigError if one would hold none."""

    def __init__(self, num_rows: int, size: int, method: LinearMethod, context: LayerContext) -> None:
        self.method = method
        self.num_rows = num_rows
        self.context = context
        rank, ranks = context.group.rank, context.group.size
        per_rank = -(-num_rows // ranks)
        if per_rank * (ranks - 1) >= num_rows:
            raise ConfigError(
                f"tensor_parallel_size={ranks} is not possible for this model: the last rank would hold none of "
                f"{num_rows} rows",
                param="tensor_parallel_size",
            )
        self._first_row = rank * per_rank
        self._num_local = min(num_rows - self._first_row, per_rank)
        self.shape = LinearShape(size, self._num_local, False, context.dtype, context.device)
        self.parameters = method.create(self.shape)

    def __call__(self, indices: Indices, onto: Value | None = None) -> Value:
        """[T] int64 -> [T, size] on every rank, added to `onto` (overwritten) if given."""
        if self.context.group.size == 1:
            return self.method.lookup(self.parameters, indices, onto)
        operations = self.context.operations
        own = self.method.lookup_share(self.parameters, indices, self._first_row, self.num_rows)
        rows = operations.all_reduce(self.context.group, own)
        return rows if onto is None else operations.add(onto, rows)

    def slots(self) -> WeightSlots:
        return {
            "weight": WeightSlot(
                (self.num_rows, self.shape.in_features),
                self._load,
                self.method.stored_bytes((self._num_local, self.shape.in_features)),
            )
        }

    def _load(self, tensor: WeightSource) -> None:
        rows = tensor.narrow(0, self._first_row, self._num_local)
        self.method.load_rows(self.parameters, "weight", rows, 0, self._num_local)


class VocabularyProjection:
    """Projection of hidden states to logits, with its own matrix or the embedding's (tied)."""

    def __init__(self, embedding: Embedding, context: LayerContext, *, tied: bool) -> None:
        self.tied = tied
        self._operations = context.operations
        size = embedding.shape.in_features
        self._table = embedding if tied else Embedding(embedding.num_rows, size, embedding.method, context)

    @property
    def input_size(self) -> int:
        return self._table.shape.in_features

    def __call__(self, hidden: Value) -> Value:
        """Logits of hidden states: [R, size] -> [R, vocabulary], from `Operations.upcast_logits`."""
        table, group = self._table, self._table.context.group
        logits = table.method.apply(table.parameters, hidden)
        if group.size > 1:
            logits = self._operations.all_gather(group, logits, table.num_rows)
        return self._operations.upcast_logits(logits)

    def slots(self) -> WeightSlots:
        """Empty if tied: the embedding loads the matrix."""
        return {} if self.tied else self._table.slots()
