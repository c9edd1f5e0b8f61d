"""Draft heads with checkpoints of their own: EAGLE and EAGLE-3, with LLaMA's layers.

A head guesses from a token's hidden state and the next token the one after. Embedding and output projection may be the
model's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from quire.config.eagle import EagleConfig
from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.kernels.arguments import LayerAttention
from quire.kernels.rotation import RotationTable
from quire.kernels.value import Indices, ReadRows, Value
from quire.layers.attention import Attention
from quire.layers.batch import ForwardBatch
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.embedding import Embedding, VocabularyProjection
from quire.layers.linear import ColumnParallelLinear, LocalRows, side_by_side
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.checkpoint_names import CheckpointNames
from quire.models.config_values import usual_rope
from quire.models.decoder import Decoder, LlamaLayer
from quire.models.head import OutputHead
from quire.quantization.file_tensor import FileTensor
from quire.quantization.integer_weight import WeightSource

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_NAMES = CheckpointNames("", re.compile(r"rotary_emb\.inv_freq$|^verifier_|^[dt]2[dt]$|^embed_tokens\."))
"""Names of tensors that a head does not need: those of its training, and a copy of the model's embedding."""


class PairAttention(Attention):
    """Attention whose input is two vectors side by side: an embedding and a hidden state."""

    def __init__(self, hidden_size: int, shape: LayerAttention, *, context: LayerContext, **options: Any) -> None:
        super().__init__(hidden_size, shape, context=context, **options)
        ranks, kv_shares = context.group.size, min(context.group.size, shape.num_kv_heads)
        shares = (ranks, kv_shares, kv_shares)
        self._of_hidden = ColumnParallelLinear(
            hidden_size, self._qkv.parts, bias=False, context=context, num_shares=shares
        )

    def of_pair(self, token: Value, hidden: Value) -> Value:
        """Queries, keys and values of a token's embedding and hidden state, [T, size] each."""
        return self._operations.add(self._qkv(token), self._of_hidden(hidden))

    def slots(self, qkv: tuple[str, ...], output: str, *, transposed: bool = False) -> WeightSlots:
        slots = super().slots(qkv, output, transposed=transposed)
        return slots | {name: side_by_side(slots[name], slot) for name, slot in self._of_hidden.slots(qkv).items()}


class PairLayer(LlamaLayer):
    """First layer of an EAGLE-3 head, which reads a hidden state and the embedding of the next token."""

    attention_class = PairAttention

    def __init__(
        self, config: ModelConfig, eagle: EagleConfig, embed: Callable[[Indices], Value], context: LayerContext
    ) -> None:
        super().__init__(config, context, 0)
        self._embed, self._adds_normed = embed, eagle.norm_before_residual
        epsilon = model_fields(config).number("rms_norm_eps", 1e-6)
        self._hidden_norm = RMSNorm(config.hidden_size, epsilon, context)

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        attention, normed = self._attention, self._hidden_norm(x)
        assert isinstance(attention, PairAttention), "the layer's own"
        projected = attention.of_pair(self._attention_norm(self._embed(batch.token_ids)), normed)
        residual = normed if self._adds_normed else x
        x = attention.attend(projected, residual, rotation, batch.attention, rows)
        return self._mlp(self._mlp_norm(x), x)

    def slots(self) -> WeightSlots:
        return super().slots() | prefixed("hidden_norm", self._hidden_norm.slots())


class UnnormedLayer(LlamaLayer):
    """First layer of an EAGLE head, without a norm before its attention."""

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        x = self._attention(x, x, rotation, batch.attention, rows)
        return self._mlp(self._mlp_norm(x), x)

    def slots(self) -> WeightSlots:
        return {name: slot for name, slot in super().slots().items() if not name.startswith("input_layernorm.")}


class EagleHead(Decoder):
    """EAGLE draft head, with its own checkpoint. A batch brings `hidden`: the model's, [T, width of EagleConfig], or
    the head's own results, [T, size]; its token_ids are the following tokens."""

    def __init__(
        self,
        config: ModelConfig,
        eagle: EagleConfig,
        stored: Collection[str],
        tables: tuple[Embedding, OutputHead],
        context: LayerContext,
    ) -> None:
        """stored: names of the checkpoint's tensors (`head_tensors`). tables: model's embedding and output head,
        used for missing ones. Raises ModelLoadError for a head that does not fit the model's."""
        size, epsilon = config.hidden_size, model_fields(config).number("rms_norm_eps", 1e-6)
        self._eagle, self._size = eagle, size
        self.token_ids: torch.Tensor | None = None
        """Token of each logit, int64; None: in order."""
        self._tokens, head = tables
        own: WeightSlots = {}
        if EMBEDDING in stored and (eagle.method == "eagle3" or self._tokens.shape.in_features != size):
            self._tokens = Embedding(eagle.vocab_size, size, context.vocabulary, context)
            own |= prefixed("embed_tokens", self._tokens.slots())
        if HEAD in stored:
            table = Embedding(eagle.draft_vocab_size, size, context.vocabulary, context)
            head = VocabularyProjection(table, context, tied=True)
            own |= prefixed("lm_head", table.slots())
        is_partial = HEAD not in stored and eagle.draft_vocab_size != eagle.vocab_size
        for name, width in ((EMBEDDING, self._tokens.shape.in_features), (HEAD, head.input_size)):
            if width != size or (name == HEAD and is_partial):
                raise ModelLoadError(f"tensor {name!r} missing: the model's does not fit this head")
        first = (
            UnnormedLayer(config, context, 0)
            if eagle.method == "eagle"
            else PairLayer(config, eagle, self._tokens, context)
        )
        layers = [first, *(LlamaLayer(config, context, number) for number in range(1, config.num_layers))]
        rotary = RotaryEmbedding(usual_rope(config), config.max_model_len, context)
        super().__init__(layers, "layers", head, _NAMES, context, [rotary] * len(layers))
        own |= {name: slot for name, slot in self.slots.items() if name.startswith("layers.")}
        if eagle.method == "eagle":
            self._of_token = LocalRows(size, size, context, bias="fc.bias" in stored)
            self._of_hidden = LocalRows(eagle.width, size, context)
            slots = self._of_token.slots("fc")
            self.slots = own | slots
            self.slots["fc.weight"] = side_by_side(slots["fc.weight"], self._of_hidden.slots("fc")["fc.weight"])
            return
        self._joined = LocalRows(eagle.width, size, context)
        self._norm = RMSNorm(size, epsilon, context)
        norms: dict[str, RMSNorm] = {}
        if eagle.norm_before_fc:
            norms["input_norm"] = RMSNorm(eagle.width, epsilon, context)
        elif eagle.fc_norm:
            norms = {f"fc_norm.{part}": RMSNorm(eagle.read_size, epsilon, context) for part in range(len(eagle.layers))}
        self._read_norms = list(norms.values())
        self.slots = own | self._joined.slots("fc") | prefixed("norm", self._norm.slots())
        for name, norm in norms.items():
            self.slots |= prefixed(name, norm.slots())

    def first_rows(self, batch: ForwardBatch) -> Value:
        hidden = batch.hidden
        assert hidden is not None, "a guess follows hidden states"
        if self._eagle.method == "eagle":
            return self._operations.add(self._of_token(self._tokens(batch.token_ids)), self._of_hidden(hidden))
        width = hidden.shape[1] if isinstance(hidden, torch.Tensor) else hidden.width
        if width == self._size:
            return self._copied(hidden)
        if len(self._read_norms) == 1:
            hidden = self._read_norms[0](hidden)
        elif self._read_norms:
            hidden = self._copied(hidden)
            for part, norm in enumerate(self._read_norms):
                hidden = self._operations.norm_columns(norm.weights, hidden, part * self._eagle.read_size)
        return self._joined(hidden)

    def leave(self, x: Value) -> Value:
        return self._norm(x) if self._norm is not None and self._eagle.norm_output else x

    def compute_logits(self, hidden: Value, slots: Indices | None = None) -> Value:
        is_normed = self._norm is None or self._eagle.norm_output
        return self._head(hidden if is_normed or self._norm is None else self._norm(hidden))

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]], elsewhere: Collection[str] = ()) -> None:
        super().load_weights(self._without_ids(weights), elsewhere)
        has_own_ids = self._eagle.draft_vocab_size != self._eagle.vocab_size
        if has_own_ids and self.token_ids is None:
            raise ModelLoadError("tensor 'd2t' missing: it says which tokens the head guesses")

    def _without_ids(self, weights: Iterable[tuple[str, WeightSource]]) -> Iterator[tuple[str, WeightSource]]:
        """Tensors that are weights. "d2t" (token of each logit minus the logit's number) sets `token_ids`."""
        for name, tensor in head_tensors(weights):
            if name != "d2t" or HEAD not in self.slots:
                yield name, tensor
                continue
            offsets = tensor.read() if isinstance(tensor, FileTensor) else tensor
            count, size = self._eagle.draft_vocab_size, self._eagle.vocab_size
            if not isinstance(offsets, torch.Tensor) or offsets.is_floating_point() or offsets.shape != (count,):
                raise ModelLoadError(f"tensor 'd2t' must be {count} whole numbers")
            ids = offsets.to(torch.int64) + torch.arange(count)
            if not bool(((ids >= 0) & (ids < size)).all()):
                raise ModelLoadError(f"tensor 'd2t' names tokens that are not among the {size} of the vocabulary")
            self.token_ids = ids


def head_tensors(weights: Iterable[tuple[str, WeightSource]]) -> Iterator[tuple[str, WeightSource]]:
    """EAGLE checkpoint's tensors under one set of names: authors' files call the first layer "midlayer"."""
    for name, tensor in weights:
        own = name.removeprefix("model.")
        yield (f"layers.0.{own.removeprefix('midlayer.')}" if own.startswith("midlayer.") else own), tensor
