"""Draft head for multi-token prediction: layers after the model's last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.kernels.value import Indices, Value
from quire.kv_cache.spec import LayerSpec
from quire.layers.batch import ForwardBatch
from quire.layers.context import LayerContext, prefixed
from quire.layers.embedding import Embedding
from quire.layers.linear import LocalRows, side_by_side
from quire.layers.norm import RMSNorm, UnitOffsetRMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.checkpoint_names import CheckpointNames
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.head import OutputHead
from quire.models.interface import CausalLM


class HeadNames(NamedTuple):
    """Checkpoint names of a head's tensors. joined: matrix for [embedding, hidden state]. token_norm, hidden_norm:
    norms of these two. norm: final norm."""

    joined: str
    token_norm: str
    hidden_norm: str
    norm: str


class DraftHead(Decoder):
    """Draft head for multi-token prediction. A batch brings `hidden`, [T, size], from the model or the previous guess,
    and as token_ids the tokens after. Returns hidden states for a further guess. Tensor names: Qwen3-Next's and Qwen
    3.5's."""

    names = HeadNames("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    norm_class: type[RMSNorm] = UnitOffsetRMSNorm

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        embedding: Embedding,
        rotary: RotaryEmbedding | None,
        head: OutputHead,
        context: LayerContext,
    ) -> None:
        """layers: numbered in the KV cache after the model's. embedding, rotary, head: parts of the model."""
        super().__init__(layers, "layers", head, CheckpointNames.of(config), context, [rotary] * len(layers))
        epsilon = model_fields(config).number("rms_norm_eps", 1e-6)
        size = config.hidden_size
        self._tokens = embedding
        self._token_norm, self._hidden_norm, self._norm = (self.norm_class(size, epsilon, context) for _ in range(3))
        self._from_token, self._from_hidden = (LocalRows(size, size, context) for _ in range(2))
        own = {name: slot for name, slot in self.slots.items() if name.startswith("layers.")}  # no head: the model's
        halves = (each.slots("joined")["joined.weight"] for each in (self._from_token, self._from_hidden))
        self.slots = own | {
            f"{self.names.joined}.weight": side_by_side(*halves),
            **prefixed(self.names.token_norm, self._token_norm.slots()),
            **prefixed(self.names.hidden_norm, self._hidden_norm.slots()),
            **prefixed(self.names.norm, self._norm.slots()),
        }

    def guess(self, index: int) -> DraftHead:
        """Head of guess `index`, with that one layer; checkpoints with one layer use it for every guess."""
        view = self.stage(range(index, index + 1))
        view._is_end = True
        return view

    def cache_specs(self) -> list[LayerSpec]:
        return [self._layers[number].cache_spec() for number in self._numbers]

    def embed(self, token_ids: Indices) -> Value:
        return self._from_token(self._token_norm(self._tokens(token_ids)))

    def first_rows(self, batch: ForwardBatch) -> Value:
        assert batch.hidden is not None, "a guess follows hidden states"
        tokens = self.embed(batch.token_ids)
        return self._operations.add(tokens, self._from_hidden(self._hidden_norm(batch.hidden)))


def with_draft_layers(config: ModelConfig) -> ModelConfig:
    """Copy of the configuration with the draft head's layers after the model's."""
    shape = config.shape
    return replace(config, shape=replace(shape, layers=shape.layers + shape.draft_layers))


def first_guess(model: CausalLM) -> CausalLM:
    """Draft head of `model` with its first guess's layer, for workers."""
    found: CausalLM = model.draft_head.guess(0)  # type: ignore[attr-defined]
    return found
