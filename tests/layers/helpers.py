"""Contexts that layers are built with in tests."""

from __future__ import annotations

import torch

from quire.layers.context import LayerContext
from quire.layers.operations import TorchOperations
from quire.parallel.interface import ProcessGroup
from quire.parallel.single import SingleRank
from quire.quantization.unquantized import UnquantizedLinear


def torch_context(dtype: torch.dtype = torch.float32, group: ProcessGroup | None = None) -> LayerContext:
    plain = UnquantizedLinear(dtype)
    return LayerContext(
        dtype=dtype,
        device=torch.device("cpu"),
        cache_dtype="float32",
        group=group or SingleRank(),
        operations=TorchOperations(),
        linear=plain,
        vocabulary=plain,
        positions=plain,
    )
