"""Token and position embeddings, and the projection back to the vocabulary. Kept whole on every rank."""

from __future__ import annotations

from quire.kernels.value import Indices, Value
from quire.layers.context import LayerContext, WeightSlot, WeightSlots
from quire.quantization.interface import LayerLinear, LinearShape


class Embedding:
    """A table of `num_rows` vectors of `size`, stored by `method`."""

    def __init__(self, num_rows: int, size: int, method: LayerLinear, context: LayerContext) -> None:
        self.method = method
        self.shape = LinearShape(size, num_rows, False, context.dtype, context.device)
        self.parameters = method.create(self.shape)

    def __call__(self, indices: Indices, onto: Value | None = None) -> Value:
        """[T] int64 -> [T, size], added to `onto` (which is used up) when given."""
        return self.method.lookup(self.parameters, indices, onto)

    def slots(self) -> WeightSlots:
        size = (self.shape.out_features, self.shape.in_features)
        return {
            "weight": WeightSlot(
                size,
                lambda tensor: self.method.load_rows(self.parameters, "weight", tensor, 0, size[0]),
                self.method.stored_bytes(size),
            )
        }


class VocabularyProjection:
    """Hidden states to logits, with a matrix of its own or the embedding's (tied)."""

    def __init__(self, embedding: Embedding, context: LayerContext, *, tied: bool) -> None:
        self.tied = tied
        self._operations = context.operations
        shape = embedding.shape
        self._table = embedding if tied else Embedding(shape.out_features, shape.in_features, embedding.method, context)

    @property
    def input_size(self) -> int:
        """Elements of a hidden state that it takes."""
        return self._table.shape.in_features

    def __call__(self, hidden: Value) -> Value:
        """[R, size] -> [R, vocabulary], as `Operations.upcast_logits` gives it."""
        table = self._table
        return self._operations.upcast_logits(table.method.apply(table.parameters, hidden))

    def slots(self) -> WeightSlots:
        """None when tied: the embedding loads the matrix."""
        return {} if self.tied else self._table.slots()
