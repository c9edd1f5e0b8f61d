"""Base of all decoder-only models, and the LLaMA-like ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Protocol, Self

from quire.config.adapters import ADAPTER_SLOTS
from quire.config.families import ARCHITECTURES
from quire.config.hf_config import model_fields
from quire.config.model import ModelConfig
from quire.config.rope import RopeConfig
from quire.kernels.rotation import RotationTable
from quire.kernels.value import Indices, ReadRows, Value
from quire.kv_cache.spec import LayerSpec
from quire.layers.attention import Attention
from quire.layers.batch import ForwardBatch, ForwardResult
from quire.layers.context import LayerContext, WeightSlots, prefixed
from quire.layers.embedding import Embedding, TokenEmbedding, VocabularyProjection
from quire.layers.latent_attention import LatentAttention
from quire.layers.mlp import GatedMLP
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.checkpoint_names import CheckpointNames, fill_slots
from quire.models.config_values import layer_attention, read_activation, usual_rope
from quire.models.head import OutputHead
from quire.models.staged import make_layers
from quire.quantization.integer_weight import WeightSource


class DecoderLayer(Protocol):
    """One layer of a decoder."""

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        """[T, hidden] -> [T, hidden]. rotation: None in a model without rotary positions. rows: [R], tokens whose
        results are needed (None: all); the result is then [R, hidden]."""
        ...

    def cache_spec(self) -> LayerSpec:
        """Layer's KV-cache spec."""
        ...

    def slots(self) -> WeightSlots:
        """Weight slots by their names inside the layer."""
        ...


class Decoder:
    """Model as a list of layers. Rows enter as embeddings, or the previous stage's hidden states, and leave by a final
    norm."""

    columns: tuple[str, ...] = ()
    _tokens: Embedding
    _norm: RMSNorm | LayerNorm | None = None
    """Norm of the last layer's results."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        prefix: str,
        head: OutputHead,
        names: CheckpointNames,
        context: LayerContext,
        rotaries: Sequence[RotaryEmbedding | None] = (),
    ) -> None:
        """prefix: checkpoint prefix of the layers, before the layer's number. rotaries: one per layer, shared by layers
        that rotate alike; empty: no layer rotates."""
        self._layers = list(layers)
        self._rotaries = rotaries or [None] * len(layers)
        self._stage = stage = context.stage
        self._numbers = range(len(layers)) if stage.count == 1 else stage.layers
        """Numbers of the layers that `forward` runs."""
        self._is_end = stage.is_last
        self._operations = context.operations
        self.adapters = context.adapters
        if context.adapters is not None:
            self.columns = (*self.columns, ADAPTER_SLOTS)
        self._head: OutputHead = head
        self._names = names
        self.slots: WeightSlots = self._stage.at_exit(prefixed("lm_head", head.slots()))
        """Slot of each checkpoint tensor; subclasses add those outside the layers."""
        for index, layer in enumerate(layers):
            self.slots |= prefixed(f"{prefix}.{index}", layer.slots())

    def project_vectors(self, head: OutputHead) -> None:
        """Make `compute_logits` apply `head` to pooled vectors, for pooling models."""
        self._head = head
        self.slots |= self._stage.at_exit(head.slots())

    def cache_specs(self) -> list[LayerSpec]:
        return [layer.cache_spec() for layer in self._layers]

    def tables(self) -> tuple[Embedding, OutputHead]:
        """Embedding and output projection, for a draft head without its own."""
        return self._tokens, self._head

    def stage(self, numbers: range) -> Self:
        """View that runs only these layers, with the same weights and KV-cache layers. Stages after the first take
        `ForwardBatch.hidden`, which all but the last return."""
        view = copy(self)
        view._numbers, view._is_end = numbers, self._is_end and numbers.stop == len(self._layers)
        return view

    def embed(self, token_ids: Indices) -> Value:
        """[T] -> [T, size]: embeddings, before any overlay."""
        return self._tokens(token_ids)

    def enter(self, x: Value, batch: ForwardBatch) -> Value:
        """Input of the first layer. x: [T, size], embeddings."""
        return x

    def leave(self, x: Value) -> Value:
        """[R, size] -> [R, output_size]: final norm."""
        return x if self._norm is None else self._norm(x)

    def forward(self, batch: ForwardBatch) -> ForwardResult[Value]:
        """Run the layers (CausalLM.forward). Given a recorder's placeholders, this records it."""
        if self.adapters is None:
            return self._forward(batch)
        with self.adapters.over(batch.columns.get(ADAPTER_SLOTS), batch.logits_rows):
            return self._forward(batch)

    def _forward(self, batch: ForwardBatch) -> ForwardResult[Value]:
        x, numbers, overlay = self.first_rows(batch), self._numbers, batch.overlay
        used = {self._rotaries[number]: None for number in numbers}
        positions = batch.rotary_positions, batch.grid_positions
        rotations = {each: None if each is None else each(*positions) for each in used}
        overlaid = () if overlay is None else overlay.layers
        last = numbers[-1] if self._is_end else None
        assert last not in (*overlaid, *batch.taps), "the last layer computes the rows that are read alone"
        tapped: dict[int, Value] = {}
        for number in numbers:
            rotation, rows = rotations[self._rotaries[number]], batch.logits_rows if number == last else None
            x = self._layers[number](x, rotation, batch, rows)
            if overlay is not None and number in overlaid:
                x = overlay.add_behind(number, x)
            if number in batch.taps:
                tapped[number] = self._copied(x)
        return ForwardResult(x if last is None else self.leave(x), tapped)

    def first_rows(self, batch: ForwardBatch) -> Value:
        """Input of this stage's first layer, [T, size]: embeddings, or rows from the stage before."""
        if batch.hidden is not None:
            return self._copied(batch.hidden)
        x = self.embed(batch.token_ids)
        return self.enter(x if batch.overlay is None else batch.overlay.put(x), batch)

    def _copied(self, x: Value) -> Value:
        return self._operations.scale(x, 1.0)

    @property
    def output_size(self) -> int:
        return self._head.input_size

    def compute_logits(self, hidden: Value, slots: Indices | None = None) -> Value:
        if self.adapters is None or slots is None:
            return self._head(hidden)
        with self.adapters.over(slots):
            return self._head(hidden)

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]], elsewhere: Collection[str] = ()) -> None:
        fill_slots(self.slots, self._names, weights, elsewhere)

    def release_workspaces(self) -> None:
        return  # nothing to release: operators run one by one

    def weight_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots.values())


class TextDecoder(Decoder):
    """Decoder with embedding, final norm and vocabulary projection; tensors named as in LLaMA's checkpoints."""

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        make_layer: Callable[[int], DecoderLayer],
        ropes: Sequence[RopeConfig | None],
        norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        """make_layer: called with a layer's number. ropes: one per layer, None without rotation. norm: class of the
        final norm."""
        self._tokens = TokenEmbedding(config.vocab_size, config.hidden_size, context)
        made = {rope: None if rope is None else RotaryEmbedding(rope, config.max_model_len, context) for rope in ropes}
        super().__init__(
            make_layers(config, context, make_layer),
            "model.layers",
            VocabularyProjection(self._tokens, context, tied=config.shape.is_tied),
            CheckpointNames.of(config),
            context,
            [made[rope] for rope in ropes],
        )
        self._norm = norm(config.hidden_size, model_fields(config).number("rms_norm_eps", 1e-6), context)
        tokens = prefixed("model.embed_tokens", self._tokens.slots())
        self.slots |= self._stage.at_entrance(tokens, is_head=config.shape.is_tied)
        self.slots |= self._stage.at_exit(prefixed("model.norm", self._norm.slots()))


FeedForward = Callable[[Value, Value], Value]
"""[T, size] and a residual [T, size], which is overwritten -> [T, size]."""


class PreNormLayer:
    """Base of layers x + attention(norm(x)), then x + mlp(norm(x)); subclasses make both parts."""

    _attention_norm: RMSNorm | LayerNorm
    _attention: Attention | LatentAttention
    _mlp_norm: RMSNorm | LayerNorm
    _mlp: FeedForward

    def __call__(
        self, x: Value, rotation: RotationTable | None, batch: ForwardBatch, rows: ReadRows | None = None
    ) -> Value:
        x = self._attention(self._attention_norm(x), x, rotation, batch.attention, rows)
        return self._mlp(self._mlp_norm(x), x)

    def cache_spec(self) -> LayerSpec:
        return self._attention.cache_spec()


class LlamaLayer(PreNormLayer):
    """LLaMA's layer, with the family's biases and head norms."""

    attention_class: type[Attention] = Attention
    _attention: Attention

    def __init__(self, config: ModelConfig, context: LayerContext, layer: int) -> None:
        fields, family = model_fields(config), ARCHITECTURES[config.architecture]
        epsilon, size = fields.number("rms_norm_eps", 1e-6), config.hidden_size
        self._attention_norm = RMSNorm(size, epsilon, context)
        self._attention = self.attention_class(
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
        """MLP or a subclass's replacement, and its slots by their names inside the layer."""
        fields, family = model_fields(config), ARCHITECTURES[config.architecture]
        width, activation = fields.integer("intermediate_size"), read_activation(config)
        mlp = GatedMLP(config.hidden_size, width, activation, bias=family.mlp_bias.read(fields), context=context)
        return mlp, prefixed("mlp", mlp.slots())

    def slots(self) -> WeightSlots:
        return {
            **prefixed("input_layernorm", self._attention_norm.slots()),
            **prefixed("self_attn", self._attention.slots(("q_proj", "k_proj", "v_proj"), "o_proj")),
            **prefixed("post_attention_layernorm", self._mlp_norm.slots()),
            **self._mlp_slots,
        }


class LlamaLike(TextDecoder):
    """Rotary positions, RMSNorm before each block, gated MLP, grouped-query attention: LLaMA, Mistral, Qwen 2 and 3."""

    layer_class: type[LlamaLayer] = LlamaLayer

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        ropes = [usual_rope(config)] * config.num_layers
        super().__init__(config, context, partial(self.layer_class, config, context), ropes)
