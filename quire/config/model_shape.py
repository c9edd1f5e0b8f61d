"""Sizes of a model, layer by layer, for the engine, `quire plan` and the simulator, which `quire.config.families` reads
from a config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

DTYPE_BYTES: Mapping[str, float] = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "mxfp4": 0.53125,
    "nvfp4": 0.5625,
}
"""Bytes of a weight in checkpoints (mxfp4 and nvfp4: scales included)."""
QUANTIZED = ("float8", "int8", "int4", "mxfp4", "nvfp4")
"""Quantised types of layers' matrices; the vocabulary's tables stay in 16 bits."""
STATE_BORDER = 64
"""Tokens between borders of a recurrent state. A layer keeps its state at the last border and later tokens' rows, so a
state's bits do not depend on steps."""
KEPT_ROWS = STATE_BORDER - 1
STATE_BYTES = 4
"""Bytes of an element of a recurrent state, always float32."""
_LINE_ELEMENTS = 16
LAYER_OVERHEAD = 3000
"""Time of a layer's norms, rotation and attention per token and hidden element, in weights whose products take as
long."""

Kind = Literal["full", "sliding", "chunked", "latent", "state", "none"]
Matrix = tuple[int, int]
"""(input features, output features) of a matrix."""


@dataclass(frozen=True)
class AttentionShape:
    """One layer's use of earlier tokens, for planning, simulation and KV specs. kind: "full", "sliding" and "chunked"
    keep a key and a value per token and head; "latent" one vector per token for all heads; "state" a state of fixed
    size per sequence; "none" nothing. key_dim, value_dim: elements of a head's key (for "latent" with its rotated part)
    and value. window: tokens of a "sliding" window or of a chunk. latent_dim: elements that "latent" keeps per token,
    of which latent_rank are compressed. index_heads, index_dim, index_top: indexer's heads, elements of its key per
    token, and tokens that it chooses (0: no indexer). conv_channels, conv_inputs: channels of a "state" layer's short
    convolution, and inputs kept of each, beside a matrix key_dim x value_dim for each of num_kv_heads value heads.
    spare_inputs: further inputs, so this number of drafts can be taken back."""

    kind: Kind
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    latent_dim: int = 0
    latent_rank: int = 0
    index_heads: int = 0
    index_dim: int = 0
    index_top: int = 0
    conv_channels: int = 0
    conv_inputs: int = 0
    spare_inputs: int = 0

    @property
    def rotated_dim(self) -> int:
        """Elements of a head that rotary positions can turn."""
        return self.latent_dim - self.latent_rank if self.kind == "latent" else self.key_dim

    @property
    def expansion_elements(self) -> int:
        """Elements of the further matrices that expand prompts of a "latent" layer; 0 where it saves nothing."""
        if self.kind != "latent" or self.index_top:
            return 0
        if self.key_dim + self.value_dim >= self.latent_dim + self.latent_rank:
            return 0
        return self.num_heads * (self.key_dim - self.rotated_dim + self.value_dim) * self.latent_rank

    @property
    def scored_dim(self) -> int:
        """Elements of a head's query at the cache."""
        return self.latent_dim if self.kind == "latent" else self.key_dim

    @property
    def attended_dim(self) -> int:
        """Elements per head that attention returns; for "latent" before values are expanded."""
        return self.latent_rank if self.kind == "latent" else self.value_dim

    @property
    def reach(self) -> int | None:
        """Number of positions that a token reads; None: all. A state counts as one."""
        return 1 if self.kind == "state" else self.window

    def token_elements(self, tp: int = 1) -> int:
        """KV-cache elements of a token on one of `tp` ranks. Ranks share heads while there are enough; each keeps the
        whole latent."""
        if self.kind in ("state", "none"):
            return 0
        if self.kind == "latent":
            return self.latent_dim + self.index_dim
        return max(1, self.num_kv_heads // tp) * (self.key_dim + self.value_dim)

    def read_elements(self, num_tokens: int) -> int:
        """KV-cache elements that the last of `num_tokens` tokens reads: its window or chunk; with an indexer, all of
        the indexer's keys and the chosen tokens."""
        if self.index_top:
            return self.index_dim * num_tokens + self.latent_dim * min(self.index_top, num_tokens)
        window = self.window or num_tokens
        read = (num_tokens - 1) % window + 1 if self.kind == "chunked" else min(window, num_tokens)
        return read * self.token_elements()

    def matrix_bytes(self, tp: int = 1) -> int:
        """Bytes of a layer's recurrent state of one sequence on one of `tp` ranks, without its kept rows and
        convolution inputs; every decoding step reads it. 0 for attention."""
        if self.kind != "state":
            return 0
        return STATE_BYTES * max(1, self.num_kv_heads // tp) * self.key_dim * line_elements(self.value_dim)

    def state_bytes(self, tp: int = 1) -> int:
        """Bytes that a layer keeps of a sequence on one of `tp` ranks: the state at the last border, the rows of tokens
        after it, and the convolution's inputs (quire/layers/states.py)."""
        if self.kind != "state":
            return 0
        num_keys, num_values = max(1, self.num_heads // tp), max(1, self.num_kv_heads // tp)
        rows = KEPT_ROWS * (num_keys * line_elements(self.key_dim) + num_values * line_elements(self.value_dim))
        inputs = (self.conv_inputs + self.spare_inputs) * line_elements(-(-self.conv_channels // tp))
        return self.matrix_bytes(tp) + STATE_BYTES * (rows + num_values * line_elements(KEPT_ROWS) + inputs)


def line_elements(count: int) -> int:
    """Count rounded up to whole cache lines of float32 elements."""
    return -(-count // _LINE_ELEMENTS) * _LINE_ELEMENTS


@dataclass(frozen=True)
class Experts:
    """Mixture of experts that replaces an MLP. num_active: experts per token. intermediate: width of an expert.
    shared_intermediate: total width of the experts that every token passes."""

    num_experts: int
    num_active: int
    intermediate: int
    shared_intermediate: int


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer, in elements. projections: attention's matrices. intermediate: width of the MLP. experts: its
    replacement. is_gated: an MLP or expert has three matrices, not two. num_vectors: elements of norms, biases, sinks
    and convolutions."""

    attention: AttentionShape
    projections: tuple[Matrix, ...]
    intermediate: int
    experts: Experts | None
    is_gated: bool
    num_vectors: int

    @property
    def attention_parameters(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.projections)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, in elements. max_model_len: positions. dtype, expert_dtype: stored types of matrices. is_tied:
    input and output embeddings are one table. embedding_width: if not `hidden`, two matrices project to `hidden` and
    back. positions: rows of a table of learned positions. num_vectors: elements of norms outside the layers. is_known:
    False if norms and biases are guessed. draft_layers: layers of a draft head; they count as weights only.
    entrance_layers: first layers, which the first pipeline stage has."""

    name: str
    family: str
    layers: tuple[LayerShape, ...]
    hidden: int
    vocab: int
    max_model_len: int
    dtype: str
    expert_dtype: str
    is_tied: bool
    embedding_width: int
    positions: int
    num_vectors: int
    is_known: bool = True
    draft_layers: tuple[LayerShape, ...] = ()
    entrance_layers: int = 1

    # -- layers -----------------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def layer_counts(self) -> Mapping[LayerShape, int]:
        return Counter(self.layers)

    @cached_property
    def attention_counts(self) -> Mapping[AttentionShape, int]:
        return Counter(layer.attention for layer in self.layers)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Number of positions that each layer's tokens read; None: all."""
        return tuple(layer.attention.reach for layer in self.layers)

    @property
    def attention(self) -> AttentionShape:
        """Attention of the first layer that keeps keys and values, like all others that do."""
        return next((each for each in self.attention_counts if each.kind != "state"), self.layers[0].attention)

    @cached_property
    def experts(self) -> Experts | None:
        """Experts, alike in all layers that have some; None: no layer has any."""
        return next((layer.experts for layer in self.layer_counts if layer.experts is not None), None)

    @property
    def num_moe_layers(self) -> int:
        return sum(layer.experts is not None for layer in self.layers)

    @property
    def is_gated(self) -> bool:
        return self.layers[0].is_gated

    @property
    def intermediate(self) -> int:
        return max(layer.intermediate for layer in self.layer_counts)

    def stages(self, pp: int) -> tuple[range, ...]:
        """Layer numbers of each of `pp` pipeline stages, at least one. They minimise the longest stage's share of a
        step."""
        rest = LAYER_OVERHEAD * self.hidden
        costs = [self._dense_parameters(layer) + self._active_experts(layer) + rest for layer in self.layers]
        before = [0, *accumulate(costs)]
        prompt, decode = before[-1], before[-1] + self.embedding_parameters

        def longest(start: int, end: int) -> float:
            head = self.embedding_parameters if end == self.num_layers else 0
            layers = before[end] - before[start]
            return max(layers / prompt, (layers + head) / decode)

        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
        for stage in range(pp):  # by the layers that are dealt: the longest stage so far, and the borders
            best = {
                end: min(
                    (max(so_far, longest(start, end)), (*borders, end))
                    for start, (so_far, borders) in best.items()
                    if start < end
                )
                for end in range(stage + self.entrance_layers, self.num_layers + 1)
            }
        return tuple(range(start, end) for start, end in pairwise(best[self.num_layers][1]))

    @property
    def most_stages(self) -> int:
        return self.num_layers - self.entrance_layers + 1

    def layers_per_stage(self, pp: int) -> int:
        """Number of layers of the largest of `pp` pipeline stages."""
        return max(map(len, self.stages(pp)))

    # -- parameters -------------------------------------------------------------------------------------------------

    def mlp_parameters(self, width: int) -> int:
        return (3 if self.is_gated else 2) * self.hidden * width

    @property
    def expert_parameters(self) -> int:
        return 0 if self.experts is None else self.mlp_parameters(self.experts.intermediate)

    @cached_property
    def dense_parameters(self) -> int:
        """Elements of the matrices that every token passes in every step, except the output projection."""
        total = 0 if self.embedding_width == self.hidden else 2 * self.embedding_width * self.hidden
        return total + sum(count * self._dense_parameters(layer) for layer, count in self.layer_counts.items())

    def _dense_parameters(self, layer: LayerShape) -> int:
        router = 0 if layer.experts is None else self.hidden * layer.experts.num_experts
        return layer.attention_parameters + self.mlp_parameters(_dense_width(layer)) + router

    def _active_experts(self, layer: LayerShape) -> int:
        return (
            0 if layer.experts is None else layer.experts.num_active * self.mlp_parameters(layer.experts.intermediate)
        )

    def with_spare_inputs(self, count: int) -> ModelShape:
        """Shape whose states keep `count` more convolution inputs, so `count` drafts can be taken back."""

        def spared(layer: LayerShape) -> LayerShape:
            kept = layer.attention
            return layer if kept.kind != "state" else replace(layer, attention=replace(kept, spare_inputs=count))

        return replace(self, layers=tuple(map(spared, self.layers)))

    @cached_property
    def draft_parameters(self) -> int:
        """Elements of the draft head: the matrix that joins its inputs, three norms, and its layers."""
        total = (2 * self.hidden + 3) * self.hidden if self.draft_layers else 0
        for layer in self.draft_layers:
            total += self._dense_parameters(layer) + layer.num_vectors
            if layer.experts is not None:
                total += layer.experts.num_experts * self.mlp_parameters(layer.experts.intermediate)
        return total

    @property
    def routed_parameters(self) -> int:
        return 0 if self.experts is None else self.num_moe_layers * self.experts.num_experts * self.expert_parameters

    @property
    def adapter_elements(self) -> int:
        """Upper bound of an adapter's elements for each rank, over all projections, routers and MLPs except experts."""
        total = 0
        for layer, count in self.layer_counts.items():
            own = sum(inputs + outputs for inputs, outputs in layer.projections)
            own += 2 * layer.projections[0][0]  # matrices that `projections` counts as one, or that rows split
            if layer.attention.kind == "full":
                keys = 2 * layer.attention.num_kv_heads * layer.attention.key_dim
                is_gated = layer.projections[0][1] > layer.projections[1][0] + keys
                own += is_gated * layer.projections[0][0]
            if width := _dense_width(layer):
                own += (3 if self.is_gated else 2) * (self.hidden + width)
            if layer.experts is not None:
                own += self.hidden + layer.experts.num_experts
                own += (self.hidden + 1) if layer.experts.shared_intermediate else 0  # a gate
            total += count * own
        return total

    @property
    def expert_adapter_elements(self) -> int:
        """`adapter_elements` of experts."""
        mixtures = ((layer.experts, count) for layer, count in self.layer_counts.items() if layer.experts is not None)
        return sum(3 * count * each.num_experts * (self.hidden + each.intermediate) for each, count in mixtures)

    @property
    def table_adapter_elements(self) -> int:
        """`adapter_elements` of embedding and head."""
        return 2 * (self.vocab + self.embedding_width)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.embedding_width

    @property
    def looked_up_parameters(self) -> int:
        """Elements of tables of which a token reads one row: untied input embeddings, learned positions."""
        return self.positions * self.hidden + (0 if self.is_tied else self.embedding_parameters)

    @property
    def expansion_parameters(self) -> int:
        """Elements of matrices that expand prompts of latent attention."""
        return sum(count * layer.attention.expansion_elements for layer, count in self.layer_counts.items())

    def parameters(self) -> int:
        """Elements of all weights, tied ones once."""
        vectors = self.num_vectors + sum(count * layer.num_vectors for layer, count in self.layer_counts.items())
        tables = self.embedding_parameters + self.looked_up_parameters
        return self.dense_parameters + self.routed_parameters + tables + vectors + self.draft_parameters

    def active_parameters(self) -> int:
        """Weight elements that one token is multiplied by."""
        active = 0 if self.experts is None else self.num_moe_layers * self.experts.num_active * self.expert_parameters
        return self.dense_parameters + active + self.embedding_parameters

    def weight_bytes(self, dtype: str | None = None) -> float:
        """Bytes of all weights in one dtype, or (None) as stored. A quantised checkpoint keeps tables, norms and biases
        in 16 bits."""
        if dtype is not None:
            return self.parameters() * DTYPE_BYTES[dtype]
        dense, routed = self.dense_parameters, self.routed_parameters
        plain = 2 if self.dtype in QUANTIZED else DTYPE_BYTES[self.dtype]
        rest = (self.parameters() - dense - routed) * plain
        return dense * DTYPE_BYTES[self.dtype] + routed * DTYPE_BYTES[self.expert_dtype] + rest

    # -- cache ------------------------------------------------------------------------------------------------------

    def kv_elements(self, tp: int = 1) -> int:
        """KV-cache elements of one token in all layers, on one of `tp` ranks."""
        return sum(count * each.token_elements(tp) for each, count in self.attention_counts.items())

    def kv_bytes_per_token(self, dtype: str = "float16", tp: int = 1) -> int:
        return int(self.kv_elements(tp) * DTYPE_BYTES[dtype])

    def matrix_bytes(self, tp: int = 1) -> int:
        """Least bytes of a sequence's states that a decoding step reads."""
        return sum(count * each.matrix_bytes(tp) for each, count in self.attention_counts.items())


def _dense_width(layer: LayerShape) -> int:
    return layer.intermediate if layer.experts is None else layer.experts.shared_intermediate
