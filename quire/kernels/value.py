"""Values that flow between layers: tensors when a model computes, placeholders while its kernels are recorded.

Layers pass these values on and never look inside them: what they want computed, the operations of their context offer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, Union

if TYPE_CHECKING:
    import torch

    from quire.kernels.cpu.recorder import Buffer, RecordedIndices, RecordedRows

Value: TypeAlias = Union["torch.Tensor", "Buffer"]
"""[T, width], or the placeholder of a matrix of that width."""

AnyValue: TypeAlias = Any
"""A Value, Indices or ReadRows that an operation takes: each back end declares its own kind. All values of a model are
of one kind, which its back end chose, so layers need not know it."""

Indices: TypeAlias = Union["torch.Tensor", "RecordedIndices"]
"""[T] int64, token ids or positions."""

ReadRows: TypeAlias = Union["torch.Tensor", "RecordedRows"]
"""[R] int64, ascending: the rows among the T whose hidden states are read."""
