"""Plain weights in the model's dtype."""

from __future__ import annotations

import torch

from quire.kernels.matmul import row_linear
from quire.quantization.integer_weight import WeightTensor, copy_into
from quire.quantization.interface import LinearShape, Parameters


class UnquantizedLinear:
    """The plain instance of LinearMethod."""

    def create(self, shape: LinearShape) -> Parameters:
        size = (shape.out_features, shape.in_features)
        parameters = {"weight": torch.empty(size, dtype=shape.dtype, device=shape.device)}
        if shape.bias:
            parameters["bias"] = torch.empty(size[0], dtype=shape.dtype, device=shape.device)
        return parameters

    def load(self, parameters: Parameters, suffix: str, tensor: WeightTensor, first_row: int, num_rows: int) -> None:
        copy_into(parameters[suffix][first_row : first_row + num_rows], tensor)

    def apply(self, parameters: Parameters, x: torch.Tensor) -> torch.Tensor:
        return row_linear(x, parameters["weight"], parameters.get("bias"))
