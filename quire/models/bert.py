"""BERT and RoBERTa: learned positions and token types, LayerNorm after each block, heads over the first token."""

from __future__ import annotations

from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.rotation import RotationTable
from quire.kernels.value import ReadRows, Value
from quire.layers.batch import ForwardBatch
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.embedding import Embedding
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm
from quire.models.encoder import Encoder, UncachedLayer, encoder_attention
from quire.models.head import HeadLinear
from quire.models.staged import make_layers

PADDING_INDEX = 1
"""RoBERTa's padding index; positions begin after it."""


class BertLayer(UncachedLayer):
    """BERT's layer: norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, config: ModelConfig, context: LayerContext, layer: int) -> None:
        fields, size = model_fields(config), config.hidden_size
        epsilon = fields.number("layer_norm_eps", 1e-12)
        self._attention = encoder_attention(config, context, layer, bias=True)
        self._attention_norm = LayerNorm(size, epsilon, context)
        activation = fields.choice("hidden_act", list(ACTIVATIONS), "gelu")
        self._mlp = MLP(size, fields.integer("intermediate_size"), activation, bias=True, context=context)
        self._output_norm = LayerNorm(size, epsilon, context)

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        x = self._attention_norm(self._attention(x, x, rotation, batch.attention, rows))
        return self._output_norm(self._mlp(x, x))

    def slots(self) -> WeightSlots:
        projections = ("self.query", "self.key", "self.value")
        return {
            **prefixed("attention", self._attention.slots(projections, "output.dense")),
            **prefixed("attention.output.LayerNorm", self._attention_norm.slots()),
            **self._mlp.slots("intermediate.dense", "output.dense"),
            **prefixed("output.LayerNorm", self._output_norm.slots()),
        }


class TanhClassifier:
    """out(tanh(dense(x))) of the first token's hidden state. dense, out: checkpoint names of the two layers."""

    def __init__(self, config: ModelConfig, context: LayerContext, dense: str, out: str) -> None:
        assert config.pooling is not None, "a classifier pools"
        self.input_size = size = config.hidden_size
        self._operations = context.operations
        self._dense = HeadLinear(dense, size, size, bias=True, context=context)
        self._out = HeadLinear(out, size, len(config.pooling.labels), bias=True, context=context)

    def __call__(self, hidden: Value) -> Value:
        return self._out(self._operations.soft_cap(self._dense(hidden), 1.0))  # tanh

    def slots(self) -> WeightSlots:
        return {**self._dense.slots(), **self._out.slots()}


class BertModel(Encoder):
    """BERT's encoder. first_position: row of the position table for the first token."""

    columns = ("segments",)

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        prefix: str = "bert",
        head: TanhClassifier | None = None,
        first_position: int = 0,
    ) -> None:
        fields, size, whole = model_fields(config), config.hidden_size, context.replicated()
        if fields.text("position_embedding_type", "absolute") != "absolute":
            raise fields.error("position_embedding_type is supported as 'absolute' only")
        layers = make_layers(config, context, lambda layer: BertLayer(config, context, layer))
        super().__init__(config, context, layers, f"{prefix}.encoder.layer", head)
        num_positions, num_types = fields.integer("max_position_embeddings"), fields.integer("type_vocab_size", 2)
        self._types = Embedding(num_types, size, context.positions, whole)
        self._positions = Embedding(num_positions, size, context.positions, whole)
        self._input_norm = LayerNorm(size, fields.number("layer_norm_eps", 1e-12), context)
        self._first_position = first_position
        self.num_token_types = num_types
        tables = {"word": self._tokens, "token_type": self._types, "position": self._positions}
        slots = prefixed(f"{prefix}.embeddings.LayerNorm", self._input_norm.slots())
        for name, table in tables.items():
            slots |= prefixed(f"{prefix}.embeddings.{name}_embeddings", table.slots())
        self.slots |= self._stage.at_entrance(slots)

    def enter(self, x: Value, batch: ForwardBatch) -> Value:
        x = self._types(batch.columns["segments"], onto=x)
        return self._input_norm(self._positions(batch.slot_positions + self._first_position, onto=x))


class BertForSequenceClassification(BertModel):
    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context, head=TanhClassifier(config, context, "bert.pooler.dense", "classifier"))


class RobertaModel(BertModel):
    def __init__(self, config: ModelConfig, context: LayerContext, head: TanhClassifier | None = None) -> None:
        fields = model_fields(config)
        if fields.integer("pad_token_id", PADDING_INDEX, minimum=0) != PADDING_INDEX:
            raise fields.error(f"pad_token_id is supported as {PADDING_INDEX} only: positions begin behind it")
        super().__init__(config, context, "roberta", head, PADDING_INDEX + 1)


class RobertaForSequenceClassification(RobertaModel):
    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context, TanhClassifier(config, context, "classifier.dense", "classifier.out_proj"))
