"""Projections of pooled vectors, as sentence-transformers' `Dense` modules."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.kernels.value import Value
from quire.layers.context import LayerContext, WeightSlots
from quire.layers.linear import ColumnParallelLinear


class DenseHead:
    """activation(W x + b) of each module in turn. Tensors: `<folder>.linear.weight` and `.bias`; the module's file
    omits the folder. Raises ModelLoadError for sizes that do not match."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        assert config.pooling is not None, "what has these modules pools"
        self.input_size = size = config.hidden_size
        self._operations = context.operations
        self._modules = config.pooling.dense
        self._linear = []
        for module in self._modules:
            if module.in_features != size:
                raise ModelLoadError(
                    f"{config.path / module.folder}: in_features is {module.in_features} for vectors of {size} elements"
                )
            size = module.out_features
            activation = None if module.activation == "tanh" else module.activation
            self._linear.append(
                ColumnParallelLinear(
                    module.in_features,
                    (size,),
                    bias=module.bias,
                    context=context.replicated(),
                    activation=activation,
                )
            )

    def __call__(self, hidden: Value) -> Value:
        for module, linear in zip(self._modules, self._linear, strict=True):
            hidden = linear(hidden)
            if module.activation == "tanh":
                hidden = self._operations.soft_cap(hidden, 1.0)
        return hidden

    def slots(self) -> WeightSlots:
        slots: WeightSlots = {}
        for module, linear in zip(self._modules, self._linear, strict=True):
            slots |= linear.slots((f"{module.folder}.linear",))
        return slots
