"""Token and position embeddings, and the projection back to the vocabulary. Kept whole on every rank."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from quire.kernels.matmul import row_linear
from quire.layers.context import LayerContext, WeightSlot, WeightSlots
from quire.quantization.integer_weight import copy_into


class Embedding:
    """A table of vectors. weight: [num_rows, size]."""

    def __init__(self, num_rows: int, size: int, context: LayerContext) -> None:
        self.weight = torch.empty(num_rows, size, dtype=context.dtype, device=context.device)

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, size]."""
        return F.embedding(indices, self.weight)

    def slots(self) -> WeightSlots:
        return {"weight": WeightSlot(tuple(self.weight.shape), partial(copy_into, self.weight))}


class VocabularyProjection:
    """Hidden states to logits, with a matrix of its own or the embedding's (tied)."""

    def __init__(self, embedding: Embedding, *, tied: bool) -> None:
        self.tied = tied
        self._weight = embedding.weight if tied else torch.empty_like(embedding.weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, size] -> [R, vocabulary] float32."""
        return row_linear(hidden, self._weight, None).float()

    def slots(self) -> WeightSlots:
        """None when tied: the embedding loads the matrix."""
        return {} if self.tied else {"weight": WeightSlot(tuple(self._weight.shape), partial(copy_into, self._weight))}
