"""GPT-OSS: attention with sinks and biases, a window in every other layer, experts with biases and clamped
activations."""

from __future__ import annotations

from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.kernels.arguments import Gating, Routing
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.moe import ExpertNames, MixtureOfExperts, MixtureShape
from quire.models.decoder import FeedForward, LlamaLayer, LlamaLike

ALPHA = 1.702
"""Factor of the gate's activation x * sigmoid(ALPHA x), called quick_gelu in `kernels/activation.py`."""
NAMES = ExpertNames(
    router="router", fused_gate_up="gate_up_proj", fused_down="down_proj", transposed=True, interleaved=True
)
NAMES_APART = ExpertNames(router="router")
"""Names for separate matrices per expert (GGUF)."""


class GptOssLayer(LlamaLayer):
    def make_mlp(self, config: ModelConfig, context: LayerContext, layer: int) -> tuple[FeedForward, WeightSlots]:
        fields, experts = model_fields(config), config.shape.layers[layer].experts
        if experts is None:
            raise fields.error("num_local_experts is missing: every layer of this architecture has experts")
        if fields.number("swiglu_alpha", ALPHA) != ALPHA:
            raise fields.error(f"swiglu_alpha must be {ALPHA}: other activations of gates are not computed")
        gating = Gating("quick_gelu", fields.number("swiglu_limit", 7.0))
        shape = MixtureShape(config.hidden_size, experts.intermediate, bias=True, router_bias=True)
        block = MixtureOfExperts(shape, Routing(experts.num_experts, experts.num_active), gating, context)
        names = NAMES_APART if fields.boolean("experts_apart", False) else NAMES
        return block, prefixed("mlp", block.slots(names))


class GptOssForCausalLM(LlamaLike):
    layer_class = GptOssLayer
