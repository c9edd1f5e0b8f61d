"""Kernel arguments beside tensors: weights and shapes of one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import torch

from quire.config.model_shape import KEPT_ROWS, line_elements

if TYPE_CHECKING:
    from quire.attention.interface import StateStep

IntegersT = TypeVar("IntegersT", int, np.ndarray, torch.Tensor)


@dataclass(frozen=True, slots=True)
class ExchangedExperts:
    """native: `_native.ExpertExchange`. ranks: rank of each expert, by its number."""

    native: Any
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class NormWeights:
    """Weights of a norm. weight, bias: [size] in the activations' dtype (or float32: the product is rounded once);
    None: ones and zeros. centred: LayerNorm (subtracts the mean), else RMSNorm."""

    size: int
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    epsilon: float
    centred: bool


@dataclass(frozen=True, slots=True)
class LengthScale:
    """Factor 1 + strength * log(1 + (position + 1) // floor) of queries, against flattening scores in long contexts."""

    floor: int
    strength: float

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """Factors of queries at `positions` ([T] integers), [T] float32."""
        steps = (positions + 1).div(self.floor, rounding_mode="floor")
        return (torch.log1p(steps.double()) * self.strength + 1.0).float()


def first_seen(positions: IntegersT, window: int, *, is_chunked: bool) -> IntegersT:
    """First position (possibly < 0) that a token sees: the last `window` positions, its own included, or its chunk of
    `window`."""
    return positions // window * window if is_chunked else positions - (window - 1)


@dataclass(slots=True)
class CacheScale:
    """Scales of a layer's keys and values in an e4m3 cache: stored = value / scale, computed in float32. Set while the
    checkpoint loads, before any attention."""

    key: float = 1.0
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Parameters of one layer's attention. scale: factor of q·k. window: tokens seen, own included (None: all); with
    is_chunked, size of chunks; in encoders, maximum distance on either side. soft_cap: scores become cap * tanh(score /
    cap) (None: off). value_dim: size of a value head (None: head_dim). sinks: [num_heads] float32, extra score per head
    without a value (None: none). cache_scale: 1 unless the cache is e4m3."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    is_chunked: bool = False
    length_scale: LengthScale | None = None
    soft_cap: float | None = None
    value_dim: int | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)
    cache_scale: CacheScale = field(default_factory=CacheScale, compare=False)

    @property
    def stored_scale(self) -> float:
        """Factor of q·k for keys as stored (e4m3: cache_scale included)."""
        return self.scale * self.cache_scale.key

    @property
    def value_width(self) -> int:
        """Size of a head of values and of the result."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """One layer's attention between its two projections. query_norm, key_norm: RMSNorm of each head, or None."""

    shape: LayerAttention
    query_norm: NormWeights | None
    key_norm: NormWeights | None


@dataclass(frozen=True, slots=True)
class RotaryFrequencies:
    """Frequencies of rotary positions. inverse_frequencies: [rotary_dim / 2] float32. magnitude: factor of cos and sin.
    axes: [rotary_dim / 2] int32, which of three positions rotates an element (None: one position)."""

    inverse_frequencies: torch.Tensor
    magnitude: float
    dtype: torch.dtype
    axes: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Parameters of one layer's latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form: all heads read
    one vector of `rank` + `rope_dim` elements per token, as key, and its first `rank` as value. scale: factor of query
    times key. top: keys that a token reads, chosen by an indexer (0: all)."""

    layer: int
    num_heads: int
    rank: int
    rope_dim: int
    scale: float
    top: int = 0

    @property
    def width(self) -> int:
        return self.rank + self.rope_dim

    @property
    def as_attention(self) -> LayerAttention:
        """Equivalent attention of all heads over one key head with narrower values."""
        return LayerAttention(self.layer, self.num_heads, 1, self.width, self.scale, value_dim=self.rank)


@dataclass(frozen=True, slots=True)
class ExpansionRule:
    """Rule for expanding a sequence's tokens where that is cheaper. key_cost: multiplications to make a head's key and
    value. saved: multiplications that expanding saves per query and key."""

    key_cost: int
    saved: int

    @classmethod
    def of(cls, rank: int, nope_dim: int, value_dim: int) -> ExpansionRule:
        expanded = nope_dim + value_dim
        return cls(rank * expanded, 2 * rank - expanded)

    def pays(self, num_tokens: np.ndarray, start: np.ndarray) -> np.ndarray:
        """True per sequence, [S] bool, if its tokens in a step, from position `start` on, are cheaper expanded."""
        num_pairs = num_tokens * start + num_tokens * num_tokens // 2
        return num_pairs * self.saved >= start * self.key_cost


@dataclass(frozen=True, slots=True)
class LatentExpansion:
    """Layer's matrices between latents and heads, to expand prompts. nope_dim: unrotated elements of a head's key;
    value_dim: its value's. absorb: queries [T, num_heads * nope_dim] -> [T, num_heads * rank]. values: attended vectors
    [T, num_heads * rank] -> [T, num_heads * value_dim]. parts: one per `heads` heads, in order: latents [N, rank] ->
    [N, heads * (nope_dim + value_dim)], keys and values."""

    nope_dim: int
    value_dim: int
    heads: int
    absorb: Callable[[Any], Any]
    values: Callable[[Any], Any]
    parts: tuple[Callable[[Any], Any], ...]

    def rule(self, shape: LatentShape) -> ExpansionRule:
        return ExpansionRule.of(shape.rank, self.nope_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class IndexShape:
    """Parameters of one layer's indexer (DeepSeek-V3.2), which chooses the keys that a token reads. A key's score is
    scale * sum over heads of weight * relu(query · key). num_heads, dim: the queries'; keys have one head of `dim`
    elements, stored after the latents of `latent_width`. rope_dim: leading rotated elements. top: keys to choose; ties
    go to earlier ones."""

    layer: int
    num_heads: int
    dim: int
    rope_dim: int
    top: int
    latent_width: int
    scale: float


TILE = 16
"""Rows of a product: the order of additions in torch's products depends on it (`kernels/matmul.py`)."""


NORM_EPSILON = 1e-6
"""Term added to the squared length of queries and keys in the delta rule."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """Part of a state page: float32 tensor of `shape` at `offset` bytes in the pages of `layer`."""

    layer: int
    offset: int
    shape: tuple[int, ...]

    @property
    def end_offset(self) -> int:
        """Bytes of a page up to the part's end."""
        return self.offset + 4 * torch.Size(self.shape).numel()

    def blocks(self, states: StateStep) -> torch.Tensor:
        """Part of all state pages as a tensor, a view of the pool: [num_blocks, *shape]."""
        return states.pages[self.layer][:, self.offset : self.end_offset].view(torch.float32).unflatten(1, self.shape)


@dataclass(frozen=True, slots=True)
class ConvolutionWeights:
    """Causal convolution per channel. kernel: [width, channels] float32, last row for the token itself; bias:
    [channels] float32 or None. activation: name in `kernels/activation.py`, or None. layer, offset: place of the last
    inputs in a page. num_spare: inputs kept beyond width - 1, for tokens taken back."""

    kernel: torch.Tensor
    bias: torch.Tensor | None
    activation: str | None
    layer: int
    offset: int
    num_spare: int = 0

    @property
    def num_kept(self) -> int:
        return len(self.kernel) - 1 + self.num_spare

    @property
    def inputs(self) -> StatePart:
        """[num_kept, channels]: input of position p in row p % num_kept; rows are padded to cache lines."""
        return StatePart(self.layer, self.offset, (self.num_kept, line_elements(self.kernel.shape[1])))


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Heads of a gated delta rule. Each key head serves num_value_heads / num_key_heads successive value heads. rate,
    time_bias: [num_value_heads] float32; each token scales the state by exp(-rate * softplus(gate + time_bias)). layer,
    offset: place of the kept data in a page; rows are padded to cache lines."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    rate: torch.Tensor
    time_bias: torch.Tensor
    layer: int
    offset: int

    @property
    def state(self) -> StatePart:
        """Place in a page of the state at the last border of STATE_BORDER tokens."""
        shape = (self.num_value_heads, self.key_dim, line_elements(self.value_dim))
        return StatePart(self.layer, self.offset, shape)

    @property
    def updates(self) -> StatePart:
        """u of `gated_delta_rule` for each token after the border."""
        shape = (self.num_value_heads, KEPT_ROWS, line_elements(self.value_dim))
        return StatePart(self.layer, self.state.end_offset, shape)

    @property
    def keys(self) -> StatePart:
        """Keys of the tokens after the border."""
        shape = (self.num_key_heads, KEPT_ROWS, line_elements(self.key_dim))
        return StatePart(self.layer, self.updates.end_offset, shape)

    @property
    def decays(self) -> StatePart:
        """Log decays of the tokens after the border."""
        return StatePart(self.layer, self.keys.end_offset, (self.num_value_heads, line_elements(KEPT_ROWS)))

    @property
    def end_offset(self) -> int:
        """Bytes of a page up to the rule's end: where the convolution's inputs begin."""
        return self.decays.end_offset


@dataclass(frozen=True, slots=True)
class GatedNormWeights:
    """RMSNorm of each head, times SiLU of a gate (after the gated delta rule). weight: [size] in the activations'
    dtype."""

    size: int
    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of a token's experts. scoring: softmax over all experts, or sigmoid of each score. renormalise: chosen
    weights sum to 1. factor: multiplies the weights. bias: [num_experts] float32, added to the scores for the choice
    only, or None. num_groups: groups of neighbouring experts, the best `top_groups` available; a group's score sums its
    `group_best` best (DeepSeek V2: 1, V3: 2)."""

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    factor: float = 1.0
    bias: torch.Tensor | None = None
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1


@dataclass(frozen=True, slots=True)
class Gating:
    """Middle of an expert's MLP: activation(gate) * up. activation: name in `kernels/activation.py`. limit: the gate is
    clamped from above, up on both sides, and 1 is added to up (GPT-OSS); None: none of this."""

    activation: str
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Counters of the rows that experts compute. by_expert: [num_experts] int64. num_rows: [1] integer, leading rows
    that are no padding; None: all."""

    by_expert: torch.Tensor
    num_rows: torch.Tensor | None = None


class AddsToExperts(Protocol):
    """ExpertAdapters, as kernels see them."""

    def slots_of(self, x: torch.Tensor) -> torch.Tensor | None: ...

    def add_to_products(
        self,
        matrix: Literal["gate_up_proj", "down_proj"],
        expert: int,
        x: torch.Tensor,
        y: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor: ...

    def on_device(self, x: torch.Tensor) -> Any: ...

    def recorded(self) -> dict[str, Any]: ...

    def broadcast(self, group: Any, source: int, place: int) -> Sequence[Any]: ...

    def replace(self, place: int, matrices: Sequence[Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Matrices of the experts' gated MLPs, from `LinearMethod.create_stack`. gate_up: [2 * intermediate, size] each,
    gate above up; down: [size, intermediate] each. weighs_input: a token's weight multiplies the expert's input, else
    its result. counts: None if nothing is counted. places: [num_experts, 3] int32, rows of `places_of`, which may
    change between steps (None: all experts are here, in order). apart: results are not added, but left for
    `Operations.add_experts`. exchange: ranks of several replicas hold the experts, and bring rows of their own."""

    gate_up: Sequence[Any]
    down: Sequence[Any]
    gating: Gating
    weighs_input: bool = False
    counts: RowCounts | None = None
    places: torch.Tensor | None = None
    apart: bool = False
    adapters: AddsToExperts | None = None
    exchange: ExchangedExperts | None = None
