"""A model of every kind of layer: full attention with sinks, a sliding window, a state (short convolution and gated
delta rule), and experts behind a router in each of them."""

from __future__ import annotations

import re
from functools import partial

import torch

from quire.config.rope import RopeConfig
from quire.kernels.arguments import ConvolutionWeights, DeltaRule, GatedNormWeights, Gating, LayerAttention, Routing
from quire.kernels.rotation import RotationTable
from quire.kernels.value import Indices, ReadRows, Value
from quire.kv_cache.spec import LayerSpec, StateSpec
from quire.layers.attention import Attention
from quire.layers.batch import ForwardBatch
from quire.layers.context import LayerContext, WeightSlot, WeightSlots, prefixed
from quire.layers.embedding import Embedding, VocabularyProjection
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.moe import ExpertNames, MixtureOfExperts, MixtureShape
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.checkpoint_names import CheckpointNames
from quire.models.decoder import Decoder
from quire.quantization.integer_weight import copy_into

SIZE, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 48, 97, 4, 2, 16, 11
EXPERTS, TOP_K, INTERMEDIATE = 5, 2, 24
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 4, 8, 12, 4
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
    """Query, key and value through a short convolution; a gated delta rule; a gated norm; experts."""

    def __init__(self, context: LayerContext) -> None:
        self._operations = context.operations
        self._norm, self._second = RMSNorm(SIZE, 1e-6, context), RMSNorm(SIZE, 1e-6, context)
        mixed, wide = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM, VALUE_HEADS * VALUE_DIM
        self._projections = {
            name: ColumnParallelLinear(SIZE, (width,), bias=False, context=context)
            for name, width in {"qkv": mixed, "gates": 2 * VALUE_HEADS, "z": wide}.items()
        }
        empty = partial(torch.empty, dtype=torch.float32, device=context.device)
        self._rule = DeltaRule(
            KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, empty(VALUE_HEADS), empty(VALUE_HEADS), STATE_LAYER, 0
        )
        self._convolution = ConvolutionWeights(empty(TAPS, mixed), None, "silu", STATE_LAYER, self._rule.end_offset)
        self.state_bytes = self._convolution.inputs.end_offset
        self._output_norm = GatedNormWeights(VALUE_DIM, empty(VALUE_DIM).to(context.dtype), 1e-6)
        self._output = RowParallelLinear(wide, SIZE, bias=False, context=context)
        self._mixture = mixture(context)

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        operations, normed = self._operations, self._norm(x)
        qkv, gates, z = (self._projections[name](normed) for name in ("qkv", "gates", "z"))
        qkv = operations.short_convolution(self._convolution, qkv, batch.states)
        mixed = operations.gated_delta_rule(self._rule, qkv, gates, batch.states)
        mixed = operations.gated_norm(self._output_norm, mixed, z)
        if rows is not None:
            mixed, x = operations.gather_rows(mixed, rows), operations.gather_rows(x, rows)
        x = self._output(mixed, x)
        return self._mixture(self._second(x), x)

    def cache_spec(self) -> LayerSpec:
        return StateSpec(self.state_bytes)

    def slots(self) -> WeightSlots:
        slots = {**prefixed("norm", self._norm.slots()), **prefixed("second", self._second.slots())}
        for name, projection in self._projections.items():
            slots |= projection.slots((name,))
        slots |= {
            "kernel": plain_slot(self._convolution.kernel),
            "rate": plain_slot(self._rule.rate),
            "time_bias": plain_slot(self._rule.time_bias),
            "z.norm": plain_slot(self._output_norm.weight),
        }
        return {**slots, **self._output.slots("output"), **prefixed("mixture", self._mixture.slots(NAMES))}


class ToyModel(Decoder):
    """order: the kinds of the layers. For the KV cache, full attention is layer 0, the window 1 and the state 2."""

    def __init__(self, context: LayerContext, order: str = "full window state") -> None:
        self._tokens = Embedding(VOCABULARY, SIZE, context.vocabulary, context)
        self.state = StateLayer(context)
        self.full, self.window = AttentionLayer(0, None, context), AttentionLayer(1, WINDOW, context)
        super().__init__(
            [getattr(self, name) for name in order.split()],
            "layers",
            VocabularyProjection(self._tokens, context, tied=False),
            CheckpointNames("", re.compile(r"(?!)")),
            context,
            [RotaryEmbedding(RopeConfig("default", 10000.0, HEAD_DIM, 64, 64), 64, context)] * len(order.split()),
        )
        self._norm = RMSNorm(SIZE, 1e-6, context)
        self.slots |= prefixed("tokens", self._tokens.slots())
        self.slots |= prefixed("norm", self._norm.slots())

    def cache_specs(self) -> list[LayerSpec]:
        """By the numbers that layers have in the KV cache, which are not those of their order."""
        return [layer.cache_spec() for layer in (self.full, self.window, self.state)]

    def compute_logits(self, hidden: Value, slots: Indices | None = None) -> Value:
        return self._operations.soft_cap(super().compute_logits(hidden, slots), 20.0)

    def fill(self) -> None:
        """Random weights, the same for all contexts, so large that every layer matters."""
        generator = torch.Generator().manual_seed(0)
        drawn = {}
        for name in sorted(self.slots):
            shape = self.slots[name].shape
            values = torch.randn(shape, generator=generator)
            is_near_one = any(word in name for word in ("norm", "second"))
            drawn[name] = 1.0 + 0.2 * values if is_near_one else values * 1.5 * shape[-1] ** -0.5
            if name.endswith("rate"):
                drawn[name] = values.abs() / 4  # what a head forgets is not all
        self.load_weights(drawn.items())


def plain_slot(tensor: torch.Tensor) -> WeightSlot:
    return WeightSlot(tuple(tensor.shape), partial(copy_into, tensor), tensor.nbytes)
