"""Token and position embeddings, and the vocabulary projection; ranks share their rows."""

from __future__ import annotations

from dataclasses import replace

from quire.errors import ConfigError
from quire.kernels.value import Indices, Value
from quire.layers.adapters import AdapterStack, Part
from quire.layers.context import LayerContext, WeightSlot, WeightSlots
from quire.layers.linear import AdaptedProduct
from quire.layers.table_adapters import TablePlace
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
        self.first_row = rank * per_rank
        self.num_local = min(num_rows - self.first_row, per_rank)
        self.shape = LinearShape(size, self.num_local, False, context.dtype, context.device)
        self.parameters = method.create(self.shape)

    def __call__(self, indices: Indices, onto: Value | None = None) -> Value:
        """[T] int64 -> [T, size] on every rank, added to `onto` (overwritten) if given."""
        if self.context.group.size == 1:
            return self.method.lookup(self.parameters, indices, onto)
        operations = self.context.operations
        own = self.method.lookup_share(self.parameters, indices, self.first_row, self.num_rows)
        rows = operations.all_reduce(self.context.group, own)
        return rows if onto is None else operations.add(onto, rows)

    def slots(self) -> WeightSlots:
        return {
            "weight": WeightSlot(
                (self.num_rows, self.shape.in_features),
                self._load,
                self.method.stored_bytes((self.num_local, self.shape.in_features)),
            )
        }

    def _load(self, tensor: WeightSource) -> None:
        rows = tensor.narrow(0, self.first_row, self.num_local)
        self.method.load_rows(self.parameters, "weight", rows, 0, self.num_local)


class TokenEmbedding(Embedding):
    """Embedding of a model's tokens, to which adapters add."""

    def __init__(self, num_rows: int, size: int, context: LayerContext) -> None:
        super().__init__(num_rows, size, context.vocabulary, context)
        adapters = context.adapters
        self._place = None if adapters is None else TablePlace(num_rows, size, adapters)

    def __call__(self, indices: Indices, onto: Value | None = None) -> Value:
        x, adapters = super().__call__(indices, onto), self.context.adapters
        if self._place is None or adapters is None or adapters.step is None:
            return x
        return self.context.operations.add_looked_up(self._place.added, indices, x, adapters.step)

    def slots(self) -> WeightSlots:
        (slot,) = super().slots().values()
        return {"weight": replace(slot, adapter=self._place)}


HEAD = "lm_head.weight"


class VocabularyProjection:
    """Projection of hidden states to logits, with its own matrix or the embedding's (tied)."""

    def __init__(self, embedding: Embedding, context: LayerContext, *, tied: bool) -> None:
        self.tied = tied
        self._operations = context.operations
        size = embedding.shape.in_features
        self._table = table = embedding if tied else Embedding(embedding.num_rows, size, embedding.method, context)
        stack = AdapterStack(size, 0, size, [Part(table.num_rows, table.first_row, table.num_local)])
        adapters = context.adapters
        self._product = AdaptedProduct(replace(context, linear=table.method), table.parameters, stack)
        if adapters is not None:
            adapters.places[HEAD] = self._product.place(range(1))

    @property
    def input_size(self) -> int:
        return self._table.shape.in_features

    def __call__(self, hidden: Value) -> Value:
        """Logits of hidden states: [R, size] -> [R, vocabulary], from `Operations.upcast_logits`."""
        table, group = self._table, self._table.context.group
        logits = self._product(hidden)
        if group.size > 1:
            logits = self._operations.all_gather(group, logits, table.num_rows)
        return self._operations.upcast_logits(logits)

    def slots(self) -> WeightSlots:
        """Empty if tied: the embedding loads the matrix."""
        return {} if self.tied else self._table.slots()
