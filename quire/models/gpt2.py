"""GPT-2: learned positions, LayerNorm before each block, checkpoint matrices stored as [in, out]."""

from __future__ import annotations

from functools import partial

from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.value import Value
from quire.layers.attention import Attention
from quire.layers.batch import ForwardBatch
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.embedding import Embedding, TokenEmbedding, VocabularyProjection
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.models.checkpoint_names import CheckpointNames
from quire.models.config_values import layer_attention
from quire.models.decoder import Decoder, PreNormLayer
from quire.models.staged import make_layers


class GPT2Layer(PreNormLayer):
    _attention: Attention
    _mlp: MLP

    def __init__(self, config: ModelConfig, context: LayerContext, layer: int) -> None:
        fields = model_fields(config)
        epsilon, size = fields.number("layer_norm_epsilon", 1e-5), config.hidden_size
        scale = config.head_dim**-0.5 if fields.boolean("scale_attn_weights", True) else 1.0
        if fields.boolean("scale_attn_by_inverse_layer_idx", False):
            scale /= layer + 1
        self._attention_norm = LayerNorm(size, epsilon, context)
        self._attention = Attention(
            size, layer_attention(config, layer, scale), qkv_bias=True, output_bias=True, context=context
        )
        self._mlp_norm = LayerNorm(size, epsilon, context)
        activation = fields.choice("activation_function", list(ACTIVATIONS), "gelu_new")
        self._mlp = MLP(size, fields.integer("n_inner", 4 * size), activation, bias=True, context=context)

    def slots(self) -> WeightSlots:
        return {
            **prefixed("ln_1", self._attention_norm.slots()),
            **prefixed("attn", self._attention.slots(("c_attn",), "c_proj", transposed=True)),
            **prefixed("ln_2", self._mlp_norm.slots()),
            **prefixed("mlp", self._mlp.slots("c_fc", "c_proj", transposed=True)),
        }


class GPT2LMHeadModel(Decoder):
    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        fields = model_fields(config)
        if fields.boolean("add_cross_attention", False):
            raise fields.error("cross-attention (add_cross_attention) is not supported")
        self._tokens: Embedding = TokenEmbedding(config.vocab_size, config.hidden_size, context)
        num_positions, whole = fields.integer("n_positions"), context.replicated()
        self._positions = Embedding(num_positions, config.hidden_size, context.positions, whole)
        super().__init__(
            make_layers(config, context, partial(GPT2Layer, config, context)),
            "transformer.h",
            VocabularyProjection(self._tokens, context, tied=config.shape.is_tied),
            CheckpointNames.of(config),
            context,
        )
        self._norm = LayerNorm(config.hidden_size, fields.number("layer_norm_epsilon", 1e-5), context)
        tokens = prefixed("transformer.wte", self._tokens.slots())
        self.slots |= self._stage.at_entrance(tokens, is_head=config.shape.is_tied)
        self.slots |= self._stage.at_entrance(prefixed("transformer.wpe", self._positions.slots()))
        self.slots |= self._stage.at_exit(prefixed("transformer.ln_f", self._norm.slots()))

    def enter(self, x: Value, batch: ForwardBatch) -> Value:
        return self._positions(batch.slot_positions, onto=x)
