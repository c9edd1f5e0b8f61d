"""DeepSeek V2 to V3.2, DeepSeek R1, Kimi K2: latent attention; dense layers first, then mixtures of experts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from quire.config.families import ARCHITECTURES
from quire.config.hf_config import model_fields
from quire.config.hf_json import Fields
from quire.config.model import ModelConfig
from quire.config.model_shape import Experts
from quire.config.rope import RopeConfig, read_rope
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.arguments import ExpansionRule, Gating, Routing
from quire.kernels.value import Indices, Value
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.latent_attention import LatentAttention, LatentHeads
from quire.layers.latent_index import IndexHeads
from quire.layers.mlp import GatedMLP
from quire.layers.moe import ExpertNames, MixtureOfExperts, MixtureShape, SharedExpert
from quire.layers.norm import RMSNorm
from quire.layers.rotary import yarn_factor
from quire.logging import get_logger
from quire.models.decoder import PreNormLayer, TextDecoder
from quire.models.draft_head import DraftHead, HeadNames, with_draft_layers
from quire.quantization.integer_weight import WeightSource

logger = get_logger(__name__)


class DeepseekLayer(PreNormLayer):
    """DeepSeek's layer: latent attention, and an MLP or experts."""

    _attention: LatentAttention

    def __init__(self, config: ModelConfig, context: LayerContext, layer: int) -> None:
        fields = model_fields(config)
        epsilon, size = fields.number("rms_norm_eps", 1e-6), config.hidden_size
        self._attention_norm = RMSNorm(size, epsilon, context)
        self._attention = LatentAttention(
            size, layer, latent_heads(config), context, _index_heads(config), expands_prompts=config.expands_prompts
        )
        self._mlp_norm = RMSNorm(size, epsilon, context)
        activation = fields.choice("hidden_act", list(ACTIVATIONS), "silu")
        shape = config.shape.layers[layer]
        self._mlp: GatedMLP | MixtureOfExperts
        self._mlp_slots: WeightSlots
        if shape.experts is None:
            has_bias = ARCHITECTURES[config.architecture].mlp_bias.read(fields)
            self._mlp = mlp = GatedMLP(size, shape.intermediate, activation, bias=has_bias, context=context)
            self._mlp_slots = mlp.slots()
        else:
            self._mlp = mixture = _mixture(config, shape.experts, activation, context)
            self._mlp_slots = mixture.slots(ExpertNames(shared="shared_experts"))

    def slots(self) -> WeightSlots:
        return {
            **prefixed("input_layernorm", self._attention_norm.slots()),
            **prefixed("self_attn", self._attention.slots()),
            **prefixed("post_attention_layernorm", self._mlp_norm.slots()),
            **prefixed("mlp", self._mlp_slots),
        }


class DeepseekHead(DraftHead):
    """Draft head stored as a layer after the model's. A further guess takes its hidden states before the norm."""

    names = HeadNames("eh_proj", "enorm", "hnorm", "shared_head.norm")
    norm_class = RMSNorm

    def leave(self, x: Value) -> Value:
        return x

    def compute_logits(self, hidden: Value, slots: Indices | None = None) -> Value:
        assert self._norm is not None, "a head has one"
        return self._head(self._norm(hidden))


class DeepseekForCausalLM(TextDecoder):
    """All DeepSeek models; config.json holds their differences."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        # Prediction modules for further tokens are stored as layers after the last.
        num_layers, num_extra = (
            config.num_layers,
            model_fields(config).integer("num_nextn_predict_layers", 0, minimum=0),
        )
        last = num_layers + max(num_extra, len(config.shape.draft_layers))
        extra = "|".join(str(layer) for layer in range(num_layers, last))
        self._extra = re.compile(rf"^model\.layers\.({extra})\." if extra else r"(?!)")
        ropes = [_rope(config, model_fields(config))] * num_layers
        super().__init__(config, context, partial(DeepseekLayer, config, context), ropes)
        self.draft_head: DeepseekHead | None = None
        if config.shape.draft_layers and context.stage.count == 1:
            layer = DeepseekLayer(
                with_draft_layers(config), replace(context, expert_counts=None, balancer=None), num_layers
            )
            self.draft_head = head = DeepseekHead(config, [layer], self._tokens, self._rotaries[0], self._head, context)
            own = {name.removeprefix("layers.0."): slot for name, slot in head.slots.items()}
            self.slots |= prefixed(f"model.layers.{num_layers}", own)

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]], elsewhere: Collection[str] = ()) -> None:
        super().load_weights(self._without_extra(weights), elsewhere)

    def _without_extra(self, weights: Iterable[tuple[str, WeightSource]]) -> Iterator[tuple[str, WeightSource]]:
        num_left_out = 0
        for name, tensor in weights:
            if name not in self.slots and self._extra.search(name):  # also a loaded draft head's copies of tables
                num_left_out += 1
            else:
                yield name, tensor
        if num_left_out:
            logger.info("%d tensors of layers that predict further tokens are left out", num_left_out)


@dataclass(frozen=True, slots=True)
class _ExpertChoice:
    """Expert selection of one generation. methods: allowed `topk_method`, default first; only `grouped` uses groups of
    experts, scored by their `group_best` best. corrects: a correction bias selects, and weights are normalised."""

    scoring: Literal["softmax", "sigmoid"]
    methods: tuple[str, ...]
    grouped: str
    group_best: int
    corrects: bool


_V2 = _ExpertChoice("softmax", ("greedy", "group_limited_greedy"), "group_limited_greedy", group_best=1, corrects=False)
_V3 = _ExpertChoice("sigmoid", ("noaux_tc",), "noaux_tc", group_best=2, corrects=True)


def _mixture(config: ModelConfig, experts: Experts, activation: str, context: LayerContext) -> MixtureOfExperts:
    fields, size = model_fields(config), config.hidden_size
    choice = _V2 if config.architecture == "DeepseekV2ForCausalLM" else _V3
    fields.choice("scoring_func", (choice.scoring,), choice.scoring)
    has_groups = fields.choice("topk_method", choice.methods, choice.methods[0]) == choice.grouped
    renormalises = fields.boolean("norm_topk_prob", choice.corrects)
    if renormalises and not choice.corrects:
        raise fields.error("norm_topk_prob must be false: the weights of this architecture's experts are not divided")
    num_groups = fields.integer("n_group", 1) if has_groups else 1
    if experts.num_experts % num_groups:
        raise fields.error(f"n_group ({num_groups}) must divide the {experts.num_experts} experts")
    routing = Routing(
        experts.num_experts,
        experts.num_active,
        choice.scoring,
        renormalises,
        fields.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        top_groups=fields.integer("topk_group", 1, maximum=num_groups) if has_groups else 1,
        group_best=choice.group_best,
    )
    shared = None
    if experts.shared_intermediate:
        if ARCHITECTURES[config.architecture].mlp_bias.read(fields):
            raise fields.error("mlp_bias is not supported: shared experts have no biases")
        shared = SharedExpert(size, experts.shared_intermediate, activation, is_gated=False, context=context)
    shape = MixtureShape(size, experts.intermediate, has_correction=choice.corrects)
    return MixtureOfExperts(shape, routing, Gating(activation), context, shared)


def latent_heads(config: ModelConfig) -> LatentHeads:
    """Latent heads of every layer. `mscale_all_dim` adds a factor to the scale where YaRN stretches the context."""
    fields, attention = model_fields(config), config.shape.attention
    rope, rope_dim = _rope(config, fields), attention.rotated_dim
    scale = attention.key_dim**-0.5
    if rope.rope_type != "default" and rope.mscale_all_dim and rope.factor is not None:
        scale *= yarn_factor(rope.factor, rope.mscale_all_dim) ** 2
    return LatentHeads(
        num_heads=attention.num_heads,
        rank=attention.latent_rank,
        nope_dim=attention.key_dim - rope_dim,
        rope_dim=rope_dim,
        value_dim=attention.value_dim,
        query_rank=fields.optional_integer("q_lora_rank"),
        scale=scale,
        bias=fields.boolean("attention_bias", False),
        interleaved=fields.boolean("rope_interleave", True),
        expansion_apart=fields.boolean("expansion_apart", False),
    )


def expansion_rule(config: ModelConfig) -> ExpansionRule:
    heads = latent_heads(config)
    return ExpansionRule.of(heads.rank, heads.nope_dim, heads.value_dim)


def _index_heads(config: ModelConfig) -> IndexHeads | None:
    attention = config.shape.attention
    if not attention.index_top:
        return None
    return IndexHeads(attention.index_heads, attention.index_dim, attention.rotated_dim, attention.index_top)


def _rope(config: ModelConfig, fields: Fields) -> RopeConfig:
    return read_rope(fields, config.shape.attention.rotated_dim, ARCHITECTURES[config.architecture].rope)
