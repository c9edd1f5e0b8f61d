"""What all decoder-only models share, and the shared body of those built like LLaMA."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.attention.interface import LayerAttention
from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.config.rope import read_rope
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.value import Indices, Value
from quire.kv_cache.spec import LayerSpec, layer_specs
from quire.layers.attention import Attention
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.embedding import Embedding, VocabularyProjection
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.checkpoint_names import CheckpointNames, fill_slots
from quire.quantization.integer_weight import WeightSource


class Decoder(ABC):
    """Part of every model: cache specs, loading, logits. A subclass fills in the body and `forward`."""

    def __init__(
        self, config: ModelConfig, context: LayerContext, head: VocabularyProjection, names: CheckpointNames
    ) -> None:
        self._specs = layer_specs(config, context.group.size)
        self._head = head
        self._names = names
        self.slots: WeightSlots = prefixed("lm_head", head.slots())
        """Where each tensor of a checkpoint goes; complete once the subclass has added its body."""

    def kv_specs(self) -> list[LayerSpec]:
        return list(self._specs)

    @abstractmethod
    def forward(self, token_ids: Indices, positions: Indices, attention: Any) -> Value:
        """As CausalLM.forward; or, given a recorder's placeholders, records it."""

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
    )


@dataclass(frozen=True)
class LlamaTraits:
    """Where a LLaMA-like family departs from LLaMA: biases of its projections, norms over query and key heads."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False


class LlamaLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, context: LayerContext, traits: LlamaTraits, layer: int) -> None:
        fields = model_fields(config)
        epsilon, size = fields.number("rms_norm_eps", 1e-6), config.hidden_size
        self._attention_norm = RMSNorm(size, epsilon, context)
        self._attention = Attention(
            size,
            layer_attention(config, layer),
            qkv_bias=traits.qkv_bias,
            output_bias=traits.output_bias,
            context=context,
            norm_epsilon=epsilon if traits.head_norms else None,
        )
        self._mlp_norm = RMSNorm(size, epsilon, context)
        activation = fields.choice("hidden_act", list(ACTIVATIONS), "silu")
        self._mlp = GatedMLP(
            size, fields.integer("intermediate_size"), activation, bias=traits.mlp_bias, context=context
        )

    def __call__(self, x: Value, rotation: Any, attention: Any) -> Value:
        """[T, hidden] -> [T, hidden]."""
        x = self._attention(self._attention_norm(x), x, rotation, attention)
        return self._mlp(self._mlp_norm(x), x)

    def slots(self) -> WeightSlots:
        return {
            **prefixed("input_layernorm", self._attention_norm.slots()),
            **prefixed("self_attn", self._attention.slots(("q_proj", "k_proj", "v_proj"), "o_proj")),
            **prefixed("post_attention_layernorm", self._mlp_norm.slots()),
            **prefixed("mlp", self._mlp.slots()),
        }


class LlamaLike(Decoder):
    """Rotary positions, RMSNorm before each block, gated MLP, grouped heads. A family is this with its traits."""

    def __init__(self, config: ModelConfig, context: LayerContext, traits: LlamaTraits) -> None:
        fields = model_fields(config)
        self._embedding = Embedding(config.vocab_size, config.hidden_size, context.vocabulary, context)
        tied = fields.boolean("tie_word_embeddings", False)
        surplus = r"rotary_emb\.inv_freq$" + (r"|^lm_head\.weight$" if tied else "")
        super().__init__(
            config,
            context,
            VocabularyProjection(self._embedding, context, tied=tied),
            CheckpointNames("model.", re.compile(surplus)),
        )
        self._rotary = RotaryEmbedding(read_rope(fields, config.head_dim), config.max_model_len, context)
        self._layers: Sequence[LlamaLayer] = [
            LlamaLayer(config, context, traits, layer) for layer in range(config.num_layers)
        ]
        self._norm = RMSNorm(config.hidden_size, fields.number("rms_norm_eps", 1e-6), context)
        self.slots |= prefixed("model.embed_tokens", self._embedding.slots())
        self.slots |= prefixed("model.norm", self._norm.slots())
        for index, layer in enumerate(self._layers):
            self.slots |= prefixed(f"model.layers.{index}", layer.slots())

    def forward(self, token_ids: Indices, positions: Indices, attention: Any) -> Value:
        x = self._embedding(token_ids)
        rotation = self._rotary(positions)
        for layer in self._layers:
            x = layer(x, rotation, attention)
        return self._norm(x)
