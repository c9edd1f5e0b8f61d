"""Values that flow between layers: tensors in computation, placeholders while kernels are recorded. Layers only pass
them to their context's operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, Union

if TYPE_CHECKING:
    import torch

    from quire.kernels.cpu.recorder import Buffer, RecordedIndices, RecordedRows

Value: TypeAlias = Union["torch.Tensor", "Buffer"]
"""[T, width], or the placeholder of such a matrix."""

AnyValue: TypeAlias = Any
"""Value, Indices or ReadRows argument of an operation, in its back end's own kind, the same for all values of a
model."""

Indices: TypeAlias = Union["torch.Tensor", "RecordedIndices"]
"""[T] int64, token ids or positions."""

ReadRows: TypeAlias = Union["torch.Tensor", "RecordedRows"]
"""[R] int64, ascending: the rows of T whose hidden states are read."""
