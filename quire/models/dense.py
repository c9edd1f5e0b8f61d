"""Dense decoders with more options than LLaMA: norms after blocks, factors, soft caps, rotations per layer. A family is
a `DenseStyle` (`quire/models/gemma.py` and others) plus the data in `quire/config/families/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from quire.config.families import ARCHITECTURES
from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.config.rope import RopeConfig, read_layer_ropes
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.arguments import LengthScale
from quire.kernels.rotation import RotationTable
from quire.kernels.value import Indices, ReadRows, Value
from quire.kv_cache.spec import LayerSpec
from quire.layers.attention import Attention
from quire.layers.batch import ForwardBatch
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.interleaved import pairs_apart
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.whole_norm import WholeNormAttention
from quire.models.config_values import layer_attention
from quire.models.decoder import FeedForward, TextDecoder

QKV, GATE_UP = ("qkv_proj",), "gate_up_proj"
"""Names of fused tensors in some families."""
MakeMLP = Callable[[ModelConfig, LayerContext, int], tuple[FeedForward, WeightSlots]]
"""Factory of a layer's MLP replacement and its slots."""


@dataclass(frozen=True, slots=True)
class BlockNorms:
    """Checkpoint names of a layer's norms, before each block and after it (before the residual is added); "" for
    none."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


@dataclass(frozen=True, slots=True)
class DenseStyle:
    """Computation of a family's decoder; defaults are LLaMA's. norms, norm: names and class of a layer's norms.
    attention_scale: factor of q·k (None: 1 / sqrt(head_dim)). attention_cap, logits_cap: soft caps (None: off).
    embedding_factor, residual_factor, logits_factor: factors of embeddings, of a block's result, and of logits.
    activation: MLP's (None: `hidden_act`). head_norm: norm of query and key heads in rotated layers (None: see the
    family). length_scale: scale of queries in layers without rotation. make_mlp: replaces the MLP."""

    norms: BlockNorms = BlockNorms()
    norm: type[RMSNorm] = RMSNorm
    attention_scale: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    logits_factor: float = 1.0
    activation: str | None = None
    head_norm: type[RMSNorm] | None = None
    length_scale: LengthScale | None = None
    make_mlp: MakeMLP | None = None


LLAMA_STYLE = DenseStyle()


class DenseLayer:
    """Attention and a gated MLP, each with a norm before, after, or both."""

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        style: DenseStyle,
        ropes: Sequence[RopeConfig | None],
        layer: int,
    ) -> None:
        rope = ropes[layer]
        fields, family = model_fields(config), ARCHITECTURES[config.architecture]
        epsilon, size, names = fields.number("rms_norm_eps", 1e-6), config.hidden_size, style.norms
        self._names, self._family = names, family
        self._operations, self._residual_factor = context.operations, style.residual_factor
        self._head_dim, self._rotary_dim = config.head_dim, 0 if rope is None else rope.rotary_dim
        used = (names.before_attention, names.after_attention, names.before_mlp, names.after_mlp)
        self._norms = {name: style.norm(size, epsilon, context) for name in used if name}
        shape = replace(
            layer_attention(config, layer, style.attention_scale),
            soft_cap=style.attention_cap,
            length_scale=style.length_scale if rope is None else None,
        )
        head_norm = style.norm if family.head_norms else style.head_norm if rope is not None else None
        biases = {"qkv_bias": family.query_bias.read(fields), "output_bias": family.output_bias.read(fields)}
        self._attention = (
            WholeNormAttention(size, shape, **biases, context=context, norm_epsilon=epsilon)
            if family.head_norms == "whole"
            else Attention(
                size,
                shape,
                **biases,
                context=context,
                norm_epsilon=None if head_norm is None else epsilon,
                norm=head_norm or style.norm,
            )
        )
        self._mlp: FeedForward | GatedMLP
        self._mlp_slots: WeightSlots
        if style.make_mlp is not None:
            self._mlp, self._mlp_slots = style.make_mlp(config, context, layer)
            return
        activation = style.activation or fields.choice("hidden_act", list(ACTIVATIONS), "silu")
        self._mlp = mlp = GatedMLP(
            size, fields.integer("intermediate_size"), activation, bias=family.mlp_bias.read(fields), context=context
        )
        self._mlp_slots = prefixed("mlp", mlp.slots(fused=GATE_UP in family.fused))

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        names = self._names
        normed = self._norm(names.before_attention, x)
        if self._adds_itself(names.after_attention):
            x = self._attention(normed, x, rotation, batch.attention, rows)
        else:
            attended = self._attention(normed, None, rotation, batch.attention, rows)
            x = x if rows is None else self._operations.gather_rows(x, rows)
            x = self._add(x, self._norm(names.after_attention, attended))
        normed = self._norm(names.before_mlp, x)
        if self._adds_itself(names.after_mlp):
            return self._mlp(normed, x)
        assert isinstance(self._mlp, GatedMLP), "what is in its place adds the residual itself"
        return self._add(x, self._norm(names.after_mlp, self._mlp(normed, None)))

    def cache_spec(self) -> LayerSpec:
        return self._attention.cache_spec()

    def slots(self) -> WeightSlots:
        family = self._family
        attention = self._attention.slots(QKV if QKV[0] in family.fused else ("q_proj", "k_proj", "v_proj"), "o_proj")
        if family.is_interleaved and self._rotary_dim:
            for name in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"):
                if name in attention:
                    attention[name] = pairs_apart(attention[name], self._head_dim, self._rotary_dim)
        slots = prefixed("self_attn", attention) | self._mlp_slots
        for name, norm in self._norms.items():
            slots |= prefixed(name, norm.slots())
        return slots

    def _norm(self, name: str, x: Value) -> Value:
        return self._norms[name](x) if name else x

    def _adds_itself(self, norm_behind: str) -> bool:
        return not norm_behind and self._residual_factor == 1.0

    def _add(self, residual: Value, computed: Value) -> Value:
        if self._residual_factor != 1.0:
            computed = self._operations.scale(computed, self._residual_factor)
        return self._operations.add(residual, computed)


class DenseDecoder(TextDecoder):
    """Decoder of DenseLayers with one style and a rotation (or none) per layer."""

    def __init__(self, config: ModelConfig, context: LayerContext, style: DenseStyle = LLAMA_STYLE) -> None:
        fields, family = model_fields(config), ARCHITECTURES[config.architecture]
        ropes = read_layer_ropes(fields, config.head_dim, family.rope, config.sliding_windows)
        super().__init__(config, context, partial(DenseLayer, config, context, style, ropes), ropes, style.norm)
        self._style = style

    def embed(self, token_ids: Indices) -> Value:
        x = super().embed(token_ids)
        return x if self._style.embedding_factor == 1.0 else self._operations.scale(x, self._style.embedding_factor)

    def compute_logits(self, hidden: Value, slots: Indices | None = None) -> Value:
        logits = super().compute_logits(hidden, slots)
        if self._style.logits_factor != 1.0:
            logits = self._operations.scale(logits, self._style.logits_factor)
        if self._style.logits_cap is not None:
            logits = self._operations.soft_cap(logits, self._style.logits_cap)
        return logits
