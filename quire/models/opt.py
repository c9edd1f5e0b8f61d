"""OPT: learned positions (with a row offset of 2), LayerNorm before each block, or after it (350m)."""

from __future__ import annotations

from functools import partial

from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.rotation import RotationTable
from quire.kernels.value import Indices, ReadRows, Value
from quire.layers.attention import Attention
from quire.layers.batch import ForwardBatch
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.embedding import Embedding, TokenEmbedding, VocabularyProjection
from quire.layers.linear import ColumnParallelLinear
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.models.checkpoint_names import CheckpointNames
from quire.models.config_values import layer_attention
from quire.models.decoder import Decoder, PreNormLayer
from quire.models.staged import make_layers

POSITION_OFFSET = 2
NORM_EPSILON = 1e-5


class OPTLayer(PreNormLayer):
    """Blocks x + block(norm(x)) or, in the 350m style, norm(x + block(x))."""

    _attention: Attention
    _mlp: MLP

    def __init__(self, config: ModelConfig, context: LayerContext, layer: int) -> None:
        fields = model_fields(config)
        size, bias = config.hidden_size, fields.boolean("enable_bias", True)
        affine = fields.boolean("layer_norm_elementwise_affine", True)
        self._norm_first = fields.boolean("do_layer_norm_before", True)
        self._attention_norm = LayerNorm(size, NORM_EPSILON, context, affine=affine)
        self._attention = Attention(
            size, layer_attention(config, layer), qkv_bias=bias, output_bias=bias, context=context
        )
        self._mlp_norm = LayerNorm(size, NORM_EPSILON, context, affine=affine)
        activation = fields.choice("activation_function", list(ACTIVATIONS), "relu")
        self._mlp = MLP(size, fields.integer("ffn_dim"), activation, bias=bias, context=context)

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        if self._norm_first:
            return super().__call__(x, rotation, batch, rows)
        x = self._attention_norm(self._attention(x, x, rotation, batch.attention, rows))
        return self._mlp_norm(self._mlp(x, x))

    def slots(self) -> WeightSlots:
        return {
            **prefixed("self_attn_layer_norm", self._attention_norm.slots()),
            **prefixed("self_attn", self._attention.slots(("q_proj", "k_proj", "v_proj"), "out_proj")),
            **prefixed("final_layer_norm", self._mlp_norm.slots()),
            **self._mlp.slots("fc1", "fc2"),
        }


class OPTForCausalLM(Decoder):
    """OPT. Embeddings and output may be narrower than the layers (`word_embed_proj_dim`)."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        fields = model_fields(config)
        size = config.hidden_size
        embedding_size = fields.integer("word_embed_proj_dim", size)
        self._tokens: Embedding = TokenEmbedding(config.vocab_size, embedding_size, context)
        num_positions = fields.integer("max_position_embeddings") + POSITION_OFFSET
        whole = context.replicated()
        self._positions = Embedding(num_positions, size, context.positions, whole)
        super().__init__(
            make_layers(config, context, partial(OPTLayer, config, context)),
            "model.decoder.layers",
            VocabularyProjection(self._tokens, context, tied=config.shape.is_tied),
            CheckpointNames.of(config),
            context,
        )
        self._norm = self._final_norm(config, context)
        self._project_in = self._project_out = None
        tokens = prefixed("model.decoder.embed_tokens", self._tokens.slots())
        self.slots |= self._stage.at_entrance(tokens, is_head=config.shape.is_tied)
        self.slots |= self._stage.at_entrance(prefixed("model.decoder.embed_positions", self._positions.slots()))
        if self._norm is not None:
            self.slots |= self._stage.at_exit(prefixed("model.decoder.final_layer_norm", self._norm.slots()))
        if embedding_size != size:
            self._project_in = ColumnParallelLinear(embedding_size, (size,), bias=False, context=whole)
            self._project_out = ColumnParallelLinear(size, (embedding_size,), bias=False, context=whole)
            self.slots |= self._stage.at_entrance(self._project_in.slots(("model.decoder.project_in",)))
            self.slots |= self._stage.at_exit(self._project_out.slots(("model.decoder.project_out",)))

    @staticmethod
    def _final_norm(config: ModelConfig, context: LayerContext) -> LayerNorm | None:
        fields = model_fields(config)
        if not fields.boolean("do_layer_norm_before", True) or fields.boolean("_remove_final_layer_norm", False):
            return None
        affine = fields.boolean("layer_norm_elementwise_affine", True)
        return LayerNorm(config.hidden_size, NORM_EPSILON, context, affine=affine)

    def embed(self, token_ids: Indices) -> Value:
        x = self._tokens(token_ids)
        return x if self._project_in is None else self._project_in(x)

    def enter(self, x: Value, batch: ForwardBatch) -> Value:
        return self._positions(batch.slot_positions + POSITION_OFFSET, onto=x)

    def leave(self, x: Value) -> Value:
        x = super().leave(x)
        return x if self._project_out is None else self._project_out(x)
