"""DeepSeek V2 and V3, DeepSeek R1, Kimi K2: latent attention, dense layers first, then mixtures of experts."""

from __future__ import annotations

from quire.config.hf_config import model_fields
from quire.config.hf_json import Fields
from quire.config.model import ModelConfig
from quire.config.rope import RopeConfig, read_rope
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.value import ReadRows, Value
from quire.kv_cache.spec import LayerSpec
from quire.layers.batch import ForwardBatch
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.embedding import Embedding, VocabularyProjection
from quire.layers.latent_attention import LatentAttention, LatentHeads
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.operations import RotationTable
from quire.layers.rotary import RotaryEmbedding, yarn_factor
from quire.models.checkpoint_names import CheckpointNames
from quire.models.decoder import Decoder


class DeepseekLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, context: LayerContext, layer: int) -> None:
        fields = model_fields(config)
        epsilon, size = fields.number("rms_norm_eps", 1e-6), config.hidden_size
        self._attention_norm = RMSNorm(size, epsilon, context)
        self._attention = LatentAttention(size, layer, latent_heads(config), context)
        self._mlp_norm = RMSNorm(size, epsilon, context)
        activation = fields.choice("hidden_act", list(ACTIVATIONS), "silu")
        has_bias = fields.boolean("mlp_bias", False)
        self._mlp = GatedMLP(size, fields.integer("intermediate_size"), activation, bias=has_bias, context=context)

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        x = self._attention(self._attention_norm(x), x, rotation, batch.attention, rows)
        return self._mlp(self._mlp_norm(x), x)

    def cache_spec(self) -> LayerSpec:
        return self._attention.cache_spec()

    def slots(self) -> WeightSlots:
        return {
            **prefixed("input_layernorm", self._attention_norm.slots()),
            **prefixed("self_attn", self._attention.slots()),
            **prefixed("post_attention_layernorm", self._mlp_norm.slots()),
            **prefixed("mlp", self._mlp.slots()),
        }


class DeepseekForCausalLM(Decoder):
    """All of the family: what its members differ in is in config.json."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        self._embedding = Embedding(config.vocab_size, config.hidden_size, context.vocabulary, context)
        super().__init__(
            [DeepseekLayer(config, context, layer) for layer in range(config.num_layers)],
            "model.layers",
            VocabularyProjection(self._embedding, context, tied=config.shape.is_tied),
            CheckpointNames.of(config),
        )
        fields = model_fields(config)
        self._rotary = RotaryEmbedding(_rope(config, fields), config.max_model_len, context)
        self._norm = RMSNorm(config.hidden_size, fields.number("rms_norm_eps", 1e-6), context)
        self.slots |= prefixed("model.embed_tokens", self._embedding.slots())
        self.slots |= prefixed("model.norm", self._norm.slots())

    def forward(self, batch: ForwardBatch) -> Value:
        x = self._embedding(batch.token_ids)
        return self._norm(self.run_layers(x, self._rotary(batch.positions), batch))


def latent_heads(config: ModelConfig) -> LatentHeads:
    """The heads of every layer. Scores are scaled once more where YaRN stretches the context (`mscale_all_dim`)."""
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
    )


def _rope(config: ModelConfig, fields: Fields) -> RopeConfig:
    return read_rope(fields, config.shape.attention.rotated_dim)
