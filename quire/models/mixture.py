"""Mixtures of experts in place of MLPs, and the LLaMA-like models with them: Mixtral, Qwen 2, 3 and 3-VL MoE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from quire.config.hf_config import model_fields
from quire.config.hf_json import Fields
from quire.config.model import ModelConfig
from quire.kernels.arguments import Gating, Routing
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.moe import ExpertNames, MixtureOfExperts, MixtureShape, SharedExpert
from quire.models.config_values import read_activation
from quire.models.decoder import FeedForward, LlamaLayer, LlamaLike


@dataclass(frozen=True, slots=True)
class _Mixture:
    """Properties of a family's mixture. prefix: name prefix of its tensors in a layer. renormalises: True if the chosen
    experts' weights sum to 1. gates_shared: the shared expert has a gate. scoring, weighs_input: see Routing,
    MixtureShape."""

    prefix: str
    names: ExpertNames
    renormalises: Callable[[Fields], bool]
    gates_shared: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    weighs_input: bool = False


_MIXTURES: Mapping[str, _Mixture] = {
    "MixtralForCausalLM": _Mixture("block_sparse_moe", ExpertNames(gate="w1", up="w3", down="w2"), lambda fields: True),
    "Llama4ForCausalLM": _Mixture(
        "feed_forward",
        ExpertNames(router="router", fused_gate_up="gate_up_proj", fused_down="down_proj", transposed=True),
        lambda fields: False,
        scoring="sigmoid",
        weighs_input=True,
    ),
    "Qwen2MoeForCausalLM": _Mixture(
        "mlp", ExpertNames(), lambda fields: fields.boolean("norm_topk_prob", False), gates_shared=True
    ),
    "Qwen3MoeForCausalLM": _Mixture("mlp", ExpertNames(), lambda fields: fields.boolean("norm_topk_prob", False)),
    "Qwen3VLMoeForCausalLM": _Mixture(
        "mlp",
        ExpertNames(fused_gate_up="gate_up_proj", fused_down="down_proj", turned=True),
        lambda fields: True,
    ),
    "Qwen3NextForCausalLM": _Mixture(
        "mlp", ExpertNames(), lambda fields: fields.boolean("norm_topk_prob", True), gates_shared=True
    ),
    "Qwen3_5MoeForCausalLM": _Mixture("mlp", ExpertNames(), lambda fields: True, gates_shared=True),
}


def mixture_block(config: ModelConfig, context: LayerContext, layer: int) -> tuple[FeedForward, WeightSlots] | None:
    """Experts of a layer and their slots by names inside it; None for a layer without any."""
    experts = config.shape.layers[layer].experts
    if experts is None:
        return None
    mixture, activation, size = _MIXTURES[config.architecture], read_activation(config), config.hidden_size
    shared, width = None, experts.shared_intermediate
    if width:
        shared = SharedExpert(size, width, activation, is_gated=mixture.gates_shared, context=context)
    renormalise = mixture.renormalises(model_fields(config))
    routing = Routing(experts.num_experts, experts.num_active, mixture.scoring, renormalise)
    shape = MixtureShape(size, experts.intermediate, weighs_input=mixture.weighs_input)
    block = MixtureOfExperts(shape, routing, Gating(activation), context, shared)
    return block, prefixed(mixture.prefix, block.slots(mixture.names))


class MixtureLayer(LlamaLayer):
    """LLaMA's layer, with experts where the model's shape has them."""

    def make_mlp(self, config: ModelConfig, context: LayerContext, layer: int) -> tuple[FeedForward, WeightSlots]:
        return mixture_block(config, context, layer) or super().make_mlp(config, context, layer)


class MixtureLlama(LlamaLike):
    layer_class = MixtureLayer
