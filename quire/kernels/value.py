"""What flows between layers: a tensor when a model computes, a placeholder while its kernels are recorded."""

from __future__ import annotations

from typing import Any, TypeAlias

Value: TypeAlias = Any
"""A torch.Tensor [T, width], or a `kernels.cpu.recorder.Buffer` of that width. Layers only pass it on."""

Indices: TypeAlias = Any
"""A torch.Tensor [T] int64 (token ids or positions), or a `kernels.cpu.recorder.RecordedIndices`."""
