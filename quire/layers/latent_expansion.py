"""The matrices that expand latents to keys and values of each head, kept as a checkpoint has them, in parts of a few
heads: for models that compute prompts in the ordinary form of attention, beside the absorbed form of single tokens."""

from __future__ import annotations

from quire.kernels.value import Value
from quire.layers.context import LayerContext
from quire.quantization.file_tensor import FileTensor
from quire.quantization.integer_weight import WeightSource
from quire.quantization.interface import LinearShape

EXPANDED_HEADS = 16
"""Heads of a part: what is expanded at a time is bounded by it."""


class ExpandedHeads:
    """Keys and values of `num_heads` heads, `EXPANDED_HEADS` in a part. rank: of compressed vectors."""

    def __init__(self, rank: int, nope_dim: int, value_dim: int, num_heads: int, context: LayerContext) -> None:
        self._nope_dim, self._value_dim = nope_dim, value_dim
        rows = nope_dim + value_dim
        counts = [min(EXPANDED_HEADS, num_heads - first) for first in range(0, num_heads, EXPANDED_HEADS)]
        self.parts = tuple(_Part(rank, count * rows, context) for count in counts)
        self.head_bytes = context.linear.stored_bytes((rows, rank))

    def load_keys(self, head: int, tensor: WeightSource) -> None:
        """tensor: [nope_dim, rank]."""
        self._load(head, 0, self._nope_dim, tensor)

    def load_values(self, head: int, tensor: WeightSource) -> None:
        """tensor: [value_dim, rank]."""
        self._load(head, self._nope_dim, self._value_dim, tensor)

    def _load(self, head: int, first: int, num_rows: int, tensor: WeightSource) -> None:
        part, index = divmod(head, EXPANDED_HEADS)
        start = index * (self._nope_dim + self._value_dim) + first
        self.parts[part].load(tensor, start, num_rows)


class _Part:
    """A matrix [out_features, rank]."""

    def __init__(self, rank: int, out_features: int, context: LayerContext) -> None:
        self._linear = context.linear
        self._parameters = self._linear.create(LinearShape(rank, out_features, False, context.dtype, context.device))

    def __call__(self, x: Value) -> Value:
        """[N, rank] -> [N, out_features]."""
        return self._linear.apply(self._parameters, x)

    def load(self, tensor: WeightSource, first_row: int, num_rows: int) -> None:
        whole = tensor.read() if isinstance(tensor, FileTensor) else tensor
        self._linear.load_rows(self._parameters, "weight", whole, first_row, num_rows)
