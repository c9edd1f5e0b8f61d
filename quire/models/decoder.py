"""What all decoder-only models share, and the shared body of those built like LLaMA."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from quire.attention.interface import LayerAttention
from quire.config.families import ARCHITECTURES
from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.config.rope import read_rope
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.value import ReadRows, Value
from quire.kv_cache.spec import LayerSpec
from quire.layers.attention import Attention
from quire.layers.batch import ForwardBatch
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.embedding import Embedding, VocabularyProjection
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.operations import RotationTable
from quire.layers.rotary import RotaryEmbedding
from quire.models.checkpoint_names import CheckpointNames, fill_slots
from quire.models.head import OutputHead
from quire.quantization.integer_weight import WeightSource


class DecoderLayer(Protocol):
    """One layer of a decoder: what it computes, what it keeps, and where its weights go."""

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        """[T, hidden] -> [T, hidden]. rotation: of the positions; None in a model without. batch: the step. rows: [R],
        the tokens whose results are read (None: all); then [R, hidden]."""
        ...

    def cache_spec(self) -> LayerSpec:
        """What the layer keeps in the KV cache."""
        ...

    def slots(self) -> WeightSlots:
        """Where the tensors of a checkpoint go, by their names inside the layer."""
        ...


class Decoder(ABC):
    """Part of every model: cache specs, loading, logits. A subclass fills in the body and `forward`."""

    columns: tuple[str, ...] = ()
    """As those of CausalLM."""

    def __init__(self, layers: Sequence[DecoderLayer], prefix: str, head: OutputHead, names: CheckpointNames) -> None:
        """prefix: of the layers' tensors in a checkpoint, before the number of the layer."""
        self._layers = layers
        self._head: OutputHead = head
        self._names = names
        self.slots: WeightSlots = prefixed("lm_head", head.slots())
        """Where each tensor of a checkpoint goes; complete once the subclass has added what is not in a layer."""
        for index, layer in enumerate(layers):
            self.slots |= prefixed(f"{prefix}.{index}", layer.slots())

    def project_vectors(self, head: OutputHead) -> None:
        """Have `compute_logits` project what was pooled, by tensors that are called as `head` says."""
        self._head = head
        self.slots |= head.slots()

    def cache_specs(self) -> list[LayerSpec]:
        return [layer.cache_spec() for layer in self._layers]

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Value:
        """As CausalLM.forward; or, given a recorder's placeholders, records it."""

    def run_layers(self, x: Value, rotation: RotationTable | None, batch: ForwardBatch) -> Value:
        """All layers in a row: [T, hidden] -> [R, hidden], the rows whose logits are read."""
        for layer in self._layers[:-1]:
            x = layer(x, rotation, batch)
        return self._layers[-1](x, rotation, batch, batch.logits_rows)

    @property
    def output_size(self) -> int:
        return self._head.input_size

    def compute_logits(self, hidden: Value) -> Value:
        return self._head(hidden)

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]], elsewhere: Collection[str] = ()) -> None:
        """As CausalLM.load_weights. elsewhere: names of the slots that only other ranks of the model have."""
        fill_slots(self.slots, self._names, weights, elsewhere)

    def release_workspaces(self) -> None:
        return  # operators run one by one and keep nothing

    def weight_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots.values())


def layer_attention(config: ModelConfig, layer: int, scale: float | None = None) -> LayerAttention:
    """The constants of one layer's attention; scale defaults to 1 / sqrt(head_dim)."""
    return LayerAttention(
        layer=layer,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5 if scale is None else scale,
        window=config.sliding_windows[layer],
        is_chunked=config.shape.layers[layer].attention.kind == "chunked",
    )


FeedForward = Callable[[Value, Value], Value]
"""[T, size] and a residual [T, size], which is used up -> [T, size]."""


def read_activation(config: ModelConfig) -> str:
    """The name of the activation between an MLP's products."""
    return model_fields(config).choice("hidden_act", list(ACTIVATIONS), "silu")


class LlamaLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)), with the biases and the head norms of the model's family."""

    def __init__(self, config: ModelConfig, context: LayerContext, layer: int) -> None:
        fields, family = model_fields(config), ARCHITECTURES[config.architecture]
        epsilon, size = fields.number("rms_norm_eps", 1e-6), config.hidden_size
        self._attention_norm = RMSNorm(size, epsilon, context)
        self._attention = Attention(
            size,
            layer_attention(config, layer),
            qkv_bias=family.query_bias.read(fields),
            output_bias=family.output_bias.read(fields),
            context=context,
            norm_epsilon=epsilon if family.head_norms else None,
            has_sinks=family.has_sinks,
        )
        self._mlp_norm = RMSNorm(size, epsilon, context)
        self._mlp, self._mlp_slots = self.make_mlp(config, context, layer)

    def make_mlp(self, config: ModelConfig, context: LayerContext, layer: int) -> tuple[FeedForward, WeightSlots]:
        """What follows the attention, and its tensors by their names inside the layer."""
        fields, family = model_fields(config), ARCHITECTURES[config.architecture]
        width, activation = fields.integer("intermediate_size"), read_activation(config)
        mlp = GatedMLP(config.hidden_size, width, activation, bias=family.mlp_bias.read(fields), context=context)
        return mlp, prefixed("mlp", mlp.slots())

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
            **prefixed("self_attn", self._attention.slots(("q_proj", "k_proj", "v_proj"), "o_proj")),
            **prefixed("post_attention_layernorm", self._mlp_norm.slots()),
            **self._mlp_slots,
        }


class LlamaLike(Decoder):
    """Rotary positions, RMSNorm before each block, gated MLP, grouped heads: LLaMA, Mistral, Qwen 2 and 3."""

    layer_class: type[LlamaLayer] = LlamaLayer
    """What its layers are."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        fields = model_fields(config)
        self._embedding = Embedding(config.vocab_size, config.hidden_size, context.vocabulary, context)
        super().__init__(
            [self.layer_class(config, context, layer) for layer in range(config.num_layers)],
            "model.layers",
            VocabularyProjection(self._embedding, context, tied=config.shape.is_tied),
            CheckpointNames.of(config),
        )
        rope = read_rope(fields, config.head_dim, ARCHITECTURES[config.architecture].rope)
        self._rotary = RotaryEmbedding(rope, config.max_model_len, context)
        self._norm = RMSNorm(config.hidden_size, fields.number("rms_norm_eps", 1e-6), context)
        self.slots |= prefixed("model.embed_tokens", self._embedding.slots())
        self.slots |= prefixed("model.norm", self._norm.slots())

    def forward(self, batch: ForwardBatch) -> Value:
        x = self._embedding(batch.token_ids)
        return self._norm(self.run_layers(x, self._rotary(batch.rotary_positions), batch))
