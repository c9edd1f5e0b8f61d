"""Values that flow between layers: tensors in computation, placeholders while kernels are recorded. Layers only pass
them to their context's operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, Union

if TYPE_CHECKING:
    import torch

    from quire.kernels.cpu.recorder import Buffer, RecordedIndices, RecordedRows

Value: TypeAlias = Union["torch.Tensor", "Buffer"]
"""Values of a model's rows: a tensor [T, width], or its placeholder while a program is recorded."""

AnyValue: TypeAlias = Any
"""Value, Indices or ReadRows argument of an operation, of its back end's kind."""

Indices: TypeAlias = Union["torch.Tensor", "RecordedIndices"]
"""Token ids or positions, [T] int64, or their placeholder."""

ReadRows: TypeAlias = Union["torch.Tensor", "RecordedRows"]
"""[R] int64, ascending: the rows of T whose hidden states are read."""
