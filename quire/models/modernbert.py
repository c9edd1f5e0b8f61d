"""ModernBERT: rotary positions, a window in most layers, gated MLPs, a norm before each block but the first."""

from __future__ import annotations

from typing import Any

from quire.config.families import ARCHITECTURES
from quire.config.hf_config import model_fields
from quire.config.hf_json import Fields
from quire.config.model import ModelConfig
from quire.config.rope import RopeConfig
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.rotation import RotationTable
from quire.kernels.value import ReadRows, Value
from quire.layers.batch import ForwardBatch
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.norm import LayerNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.encoder import Encoder, UncachedLayer, encoder_attention
from quire.models.head import HeadLinear
from quire.models.staged import make_layers

FULL, SLIDING = "full_attention", "sliding_attention"


class ModernBertLayer(UncachedLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); layer 0 has no attention norm. is_sliding: attends within half of
    `local_attention`."""

    def __init__(self, config: ModelConfig, context: LayerContext, layer: int, *, is_sliding: bool) -> None:
        fields, size = model_fields(config), config.hidden_size
        window = fields.integer("local_attention", 128) // 2 if is_sliding else None
        self.is_sliding = is_sliding
        self._attention_norm = None if layer == 0 else make_norm(fields, size, context)
        bias = fields.boolean("attention_bias", False)
        self._attention = encoder_attention(config, context, layer, bias=bias, window=window)
        self._mlp_norm = make_norm(fields, size, context)
        bias, width = fields.boolean("mlp_bias", False), fields.integer("intermediate_size")
        activation = fields.choice("hidden_activation", list(ACTIVATIONS), "gelu")
        self._gate_up = ColumnParallelLinear(
            size, (width, width), bias=bias, context=context, activation=activation, gated=True
        )
        self._down = RowParallelLinear(width, size, bias=bias, context=context)

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        attended = x if self._attention_norm is None else self._attention_norm(x)
        x = self._attention(attended, x, rotation, batch.attention, rows)
        return self._down(self._gate_up(self._mlp_norm(x)), x)

    def slots(self) -> WeightSlots:
        return {
            **({} if self._attention_norm is None else prefixed("attn_norm", self._attention_norm.slots())),
            **prefixed("attn", self._attention.slots(("Wqkv",), "Wo")),
            **prefixed("mlp_norm", self._mlp_norm.slots()),
            **prefixed("mlp", {**self._gate_up.slots(("Wi",)), **self._down.slots("Wo")}),
        }


class PredictionHead:
    """Classification head: classifier(norm(activation(dense(x)))) of the pooled vector."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        assert config.pooling is not None, "a classifier pools"
        fields, whole = model_fields(config), context.replicated()
        self.input_size = size = config.hidden_size
        activation = fields.choice("classifier_activation", list(ACTIVATIONS), "gelu")
        self._dense = ColumnParallelLinear(
            size, (size,), bias=fields.boolean("classifier_bias", False), context=whole, activation=activation
        )
        self._norm = make_norm(fields, size, context)
        self._out = HeadLinear("classifier", size, len(config.pooling.labels), bias=True, context=context)

    def __call__(self, hidden: Value) -> Value:
        return self._out(self._norm(self._dense(hidden)))

    def slots(self) -> WeightSlots:
        return {
            **self._dense.slots(("head.dense",)),
            **prefixed("head.norm", self._norm.slots()),
            **self._out.slots(),
        }


class ModernBertModel(Encoder):
    def __init__(self, config: ModelConfig, context: LayerContext, head: PredictionHead | None = None) -> None:
        fields, size = model_fields(config), config.hidden_size
        sliding = _sliding_layers(fields, config.num_layers)
        layers = make_layers(
            config, context, lambda layer: ModernBertLayer(config, context, layer, is_sliding=sliding[layer])
        )
        rotaries = {
            is_sliding: RotaryEmbedding(_rope(config, is_sliding=is_sliding), config.max_model_len, context)
            for is_sliding in sorted(set(sliding))
        }
        super().__init__(config, context, layers, "model.layers", head, [rotaries[each] for each in sliding])
        self._input_norm = make_norm(fields, size, context)
        self._norm = make_norm(fields, size, context)
        self.slots |= self._stage.at_entrance(prefixed("model.embeddings.tok_embeddings", self._tokens.slots()))
        self.slots |= self._stage.at_entrance(prefixed("model.embeddings.norm", self._input_norm.slots()))
        self.slots |= self._stage.at_exit(prefixed("model.final_norm", self._norm.slots()))

    def enter(self, x: Value, batch: ForwardBatch) -> Value:
        return self._input_norm(x)


class ModernBertForSequenceClassification(ModernBertModel):
    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context, PredictionHead(config, context))


def make_norm(fields: Fields, size: int, context: LayerContext) -> LayerNorm:
    """LayerNorm, with a bias if the model's norms have one."""
    return LayerNorm(size, fields.number("norm_eps", 1e-5), context, bias=fields.boolean("norm_bias", False))


def _sliding_layers(fields: Fields, num_layers: int) -> list[bool]:
    kinds = fields.values.get("layer_types")
    if kinds is None:
        every = fields.integer("global_attn_every_n_layers", 3)
        return [layer % every != 0 for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {FULL, SLIDING}:
        raise fields.error(f"layer_types must name {num_layers} layers, each one of {FULL}, {SLIDING}")
    return [kind == SLIDING for kind in kinds]


def _rope(config: ModelConfig, *, is_sliding: bool) -> RopeConfig:
    """Rotation of one kind of layer; Transformers 5 has settings per kind, older files a base per kind."""
    fields, usual = model_fields(config), ARCHITECTURES[config.architecture].rope
    if is_sliding:
        kind, theta = SLIDING, fields.optional_number(usual.local_key) or usual.local_theta
    else:
        kind, theta = FULL, fields.optional_number("global_rope_theta") or usual.theta
    settings: Any = fields.values.get("rope_parameters")
    if settings is not None:
        own = settings.get(kind) if isinstance(settings, dict) else None
        if not isinstance(own, dict):
            raise fields.error(f"rope_parameters must have settings for {kind}")
        rope = Fields(own, f"{fields.where}: rope_parameters.{kind}")
        rope.choice("rope_type", ("default",), "default")
        theta = rope.number("rope_theta", theta)
    assert theta is not None, "the family has a base for each kind"
    positions = fields.integer("max_position_embeddings")
    return RopeConfig("default", theta, config.head_dim, positions, positions)
