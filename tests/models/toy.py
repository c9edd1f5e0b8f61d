"""A model of every kind of layer: full attention with sinks, a sliding window, a state (short convolution and gated
delta rule), and experts behind a router in each of them."""

from __future__ import annotations

import re
from functools import partial

import torch

from quire.attention.interface import LayerAttention
from quire.kernels.value import ReadRows, Value
from quire.kv_cache.spec import LayerSpec, StateSpec
from quire.layers.attention import Attention
from quire.layers.batch import ForwardBatch
from quire.layers.context import LayerContext, WeightSlot, WeightSlots, prefixed
from quire.layers.embedding import Embedding, VocabularyProjection
from quire.layers.experts import Gating, Routing
from quire.layers.functional import ConvolutionWeights, DeltaRule, StatePart
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.moe import ExpertNames, MixtureOfExperts, MixtureShape
from quire.layers.norm import RMSNorm
from quire.layers.operations import RotaryFrequencies, RotationTable
from quire.models.checkpoint_names import CheckpointNames
from quire.models.decoder import Decoder
from quire.quantization.integer_weight import copy_into

SIZE, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 48, 97, 4, 2, 16, 11
EXPERTS, TOP_K, INTERMEDIATE = 5, 2, 24
STATE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 8, 12, 4
STATE_LAYER = 2


NAMES = ExpertNames(router="router", fused_gate_up="gate_up", fused_down="down")


def mixture(context: LayerContext) -> MixtureOfExperts:
    return MixtureOfExperts(MixtureShape(SIZE, INTERMEDIATE), Routing(EXPERTS, TOP_K), Gating("silu"), context)


class AttentionLayer:
    def __init__(self, layer: int, window: int | None, context: LayerContext) -> None:
        shape = LayerAttention(layer, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, window)
        self._norm, self._second = RMSNorm(SIZE, 1e-6, context), RMSNorm(SIZE, 1e-6, context)
        self._attention = Attention(
            SIZE, shape, qkv_bias=False, output_bias=False, context=context, has_sinks=window is None
        )
        self._mixture = mixture(context)

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        x = self._attention(self._norm(x), x, rotation, batch.attention, rows)
        return self._mixture(self._second(x), x)

    def cache_spec(self) -> LayerSpec:
        return self._attention.cache_spec()

    def slots(self) -> WeightSlots:
        return {
            **prefixed("norm", self._norm.slots()),
            **prefixed("second", self._second.slots()),
            **prefixed("attention", self._attention.slots(("q", "k", "v"), "o")),
            **prefixed("mixture", self._mixture.slots(NAMES)),
        }


class StateLayer:
    """Query, key and value through a short convolution each; a gated delta rule; a gate; experts."""

    def __init__(self, context: LayerContext) -> None:
        self._operations = context.operations
        self._norm, self._second = RMSNorm(SIZE, 1e-6, context), RMSNorm(SIZE, 1e-6, context)
        widths = {
            "q": STATE_HEADS * KEY_DIM,
            "k": STATE_HEADS * KEY_DIM,
            "v": STATE_HEADS * VALUE_DIM,
            "decay": STATE_HEADS,
            "beta": STATE_HEADS,
            "gate": STATE_HEADS * VALUE_DIM,
        }
        self._projections = {
            name: ColumnParallelLinear(SIZE, (width,), bias=False, context=context) for name, width in widths.items()
        }
        self._convolutions, offset = {}, 0
        for name in ("q", "k", "v"):
            kernel = torch.empty(widths[name], TAPS, dtype=context.dtype, device=context.device)
            part = StatePart(STATE_LAYER, offset, (widths[name], TAPS - 1))
            self._convolutions[name] = ConvolutionWeights(kernel, None, "silu", part)
            offset += part.nbytes
        part = StatePart(STATE_LAYER, offset, (STATE_HEADS, KEY_DIM, VALUE_DIM))
        self._rule = DeltaRule(STATE_HEADS, KEY_DIM, VALUE_DIM, part)
        self.state_bytes = offset + part.nbytes
        self._output = RowParallelLinear(widths["v"], SIZE, bias=False, context=context)
        self._mixture = mixture(context)

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        operations, normed = self._operations, self._norm(x)
        projected = {name: projection(normed) for name, projection in self._projections.items()}
        q, k, v = (
            operations.short_convolution(weights, projected[name], batch.states)
            for name, weights in self._convolutions.items()
        )
        decay = operations.soft_cap(projected["decay"], 0.5)
        beta = operations.scale(operations.soft_cap(projected["beta"], 1.0), 0.5)
        mixed = operations.gated_delta_rule(self._rule, (q, k, v, decay, beta), batch.states)
        mixed = operations.multiply(mixed, projected["gate"])
        if rows is not None:
            mixed, x = operations.gather_rows(mixed, rows), operations.gather_rows(x, rows)
        x = self._output(mixed, x)
        return self._mixture(self._second(x), x)

    def cache_spec(self) -> LayerSpec:
        return StateSpec(self.state_bytes, 64)

    def slots(self) -> WeightSlots:
        slots = {**prefixed("norm", self._norm.slots()), **prefixed("second", self._second.slots())}
        for name, projection in self._projections.items():
            slots |= projection.slots((name,))
        for name, weights in self._convolutions.items():
            slots[f"{name}.kernel"] = plain_slot(weights.kernel)
        return {**slots, **self._output.slots("output"), **prefixed("mixture", self._mixture.slots(NAMES))}


class ToyModel(Decoder):
    """order: the kinds of the layers. Layers of attention are numbered as the KV cache numbers them."""

    def __init__(self, context: LayerContext, order: str = "full window state") -> None:
        self._operations = context.operations
        self._tokens = Embedding(VOCABULARY, SIZE, context.vocabulary, context)
        self.state = StateLayer(context)
        kinds = {"full": AttentionLayer(0, None, context), "window": AttentionLayer(1, WINDOW, context)}
        super().__init__(
            [kinds.get(name, self.state) for name in order.split()],
            "layers",
            VocabularyProjection(self._tokens, context, tied=False),
            CheckpointNames("", re.compile(r"(?!)")),
        )
        inverse = 10000.0 ** (-torch.arange(HEAD_DIM // 2, device=context.device) / (HEAD_DIM // 2))
        self._frequencies = RotaryFrequencies(inverse.float(), 1.0, context.dtype)
        self._norm = RMSNorm(SIZE, 1e-6, context)
        self.slots |= prefixed("tokens", self._tokens.slots())
        self.slots |= prefixed("norm", self._norm.slots())

    def cache_specs(self) -> list[LayerSpec]:
        """Of the layers with attention: no back end reads states from the pool yet, so tests hold them themselves."""
        attention = [layer for layer in self._layers if layer is not self.state]
        return sorted((layer.cache_spec() for layer in attention), key=lambda spec: spec.window or 0)

    def forward(self, batch: ForwardBatch) -> Value:
        rotation = self._operations.rotation(self._frequencies, batch.positions)
        return self._norm(self.run_layers(self._tokens(batch.token_ids), rotation, batch))

    def compute_logits(self, hidden: Value) -> Value:
        return self._operations.soft_cap(super().compute_logits(hidden), 20.0)

    def fill(self) -> None:
        """Random weights, the same for all contexts, so large that every layer matters."""
        generator = torch.Generator().manual_seed(0)
        drawn = {}
        for name in sorted(self.slots):
            shape = self.slots[name].shape
            values = torch.randn(shape, generator=generator)
            drawn[name] = 1.0 + 0.2 * values if "norm" in name or "second" in name else values * 1.5 * shape[-1] ** -0.5
        self.load_weights(drawn.items())


def plain_slot(tensor: torch.Tensor) -> WeightSlot:
    return WeightSlot(tuple(tensor.shape), partial(copy_into, tensor), tensor.nbytes)
