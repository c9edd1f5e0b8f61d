"""Pipeline stage as a model: some of the layers, with links for incoming and outgoing hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from quire.config.model import ModelConfig
from quire.kernels.rotation import RotationTable
from quire.kernels.value import ReadRows, Value
from quire.kv_cache.spec import LayerSpec, layer_specs
from quire.layers.batch import ForwardBatch, ForwardResult
from quire.layers.context import LayerContext, WeightSlots
from quire.models.interface import CausalLM
from quire.parallel.stage import Stage
from quire.quantization.integer_weight import WeightSource

if TYPE_CHECKING:
    from quire.models.decoder import DecoderLayer


class ElsewhereLayer:
    """Stand-in for another stage's layer, with its cache spec (None: it keeps nothing)."""

    def __init__(self, spec: LayerSpec | None) -> None:
        self._spec = spec

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        raise AssertionError("another stage computes this layer")

    def cache_spec(self) -> LayerSpec:
        assert self._spec is not None, "a layer of an encoder keeps nothing"
        return self._spec

    def slots(self) -> WeightSlots:
        return {}


def make_layers(
    config: ModelConfig, context: LayerContext, make_layer: Callable[[int], DecoderLayer]
) -> list[DecoderLayer]:
    """All layers of a model, with stand-ins for those of other stages. make_layer: called with a layer's number."""
    stage = context.stage
    if stage.count == 1:
        return [make_layer(number) for number in range(config.num_layers)]
    specs = dict(enumerate(layer_specs(config, context.group.size, context.dealt_to)))  # none of an encoder
    return [
        make_layer(number) if number in stage.layers else ElsewhereLayer(specs.get(number))
        for number in range(config.num_layers)
    ]


class StagedModel:
    """CausalLM over one stage. Every pass, dummy ones too, runs on all stages in the same order."""

    def __init__(self, model: CausalLM, stage: Stage, hidden_size: int, dtype: torch.dtype) -> None:
        """model: stage's layers. hidden_size, dtype: properties of the hidden states between stages."""
        self._model = model
        self._stage = stage
        self._hidden_size = hidden_size
        self._dtype = dtype

    @property
    def columns(self) -> Sequence[str]:
        return self._model.columns

    def cache_specs(self) -> list[LayerSpec]:
        """Specs of all layers of the model, so all stages agree."""
        return self._model.cache_specs()

    @property
    def output_size(self) -> int:
        return self._model.output_size

    def forward(self, batch: ForwardBatch) -> ForwardResult[torch.Tensor]:
        """Run this stage's layers (CausalLM.forward). On earlier stages hidden states go to the next one, and returned
        ones are meaningless."""
        incoming, outgoing = self._stage.incoming, self._stage.outgoing
        if outgoing is not None:
            batch = batch._replace(logits_rows=None)  # the next stage needs all rows
        if incoming is None:
            result = self._model.forward(batch)
        else:
            rows = incoming.receive((len(cast("torch.Tensor", batch.token_ids)), self._hidden_size), self._dtype)
            result = self._model.forward(batch.having(hidden=rows))
            incoming.release()
        if outgoing is not None:
            outgoing.send(result.hidden)
        return result

    def compute_logits(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        assert self._stage.is_last, "the last stage samples"
        return self._model.compute_logits(hidden, slots)

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]]) -> None:
        self._model.load_weights(weights)

    def release_workspaces(self) -> None:
        self._model.release_workspaces()

    def weight_bytes(self) -> int:
        return self._model.weight_bytes()
