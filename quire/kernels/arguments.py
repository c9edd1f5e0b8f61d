"""The arguments of kernels beside tensors: weights and shapes of one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch

from quire.config.model_shape import KEPT_ROWS, line_elements

if TYPE_CHECKING:
    from quire.attention.interface import StateStep

IntegersT = TypeVar("IntegersT", int, np.ndarray, torch.Tensor)


@dataclass(frozen=True, slots=True)
class NormWeights:
    """weight, bias: [size] in the activations' dtype (or float32: the product is rounded once), or None for ones and
    zeros. centred: LayerNorm, which subtracts the mean; else RMSNorm."""

    size: int
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    epsilon: float
    centred: bool


@dataclass(frozen=True, slots=True)
class LengthScale:
    """Queries multiplied by 1 + strength * log(1 + (position + 1) // floor), against scores that flatten in a long
    context."""

    floor: int
    strength: float

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """positions: [T] integers -> [T] float32."""
        steps = (positions + 1).div(self.floor, rounding_mode="floor")
        return (torch.log1p(steps.double()) * self.strength + 1.0).float()


def first_seen(positions: IntegersT, window: int, *, is_chunked: bool) -> IntegersT:
    """The first position, possibly below 0, that a token at a position sees: of the last `window` ones, its own
    included, or of its chunk of `window`."""
    return positions // window * window if is_chunked else positions - (window - 1)


@dataclass(slots=True)
class CacheScale:
    """Factors of a layer's keys and of its values in a cache of e4m3 numbers: elements are stored divided by them, in
    float32, and rounded once. Set while a checkpoint is loaded, before anything attends."""

    key: float = 1.0
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The constants of one layer's attention. scale: multiplies q·k; window: tokens seen, the own one included
    (None: all), or, if is_chunked, the chunks that positions are cut into, of which a token sees its own; in encoders,
    most positions between a token and one that it sees, on either side. length_scale: factors of queries (None: none).
    soft_cap: scores become cap * tanh(score / cap) (None: off). value_dim: elements of a value head (None: head_dim).
    sinks: [num_heads] float32, a score for each head that no value belongs to (None: none). cache_scale: 1 in caches of
    other numbers than e4m3."""

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
        """Multiplies q·k of keys as they are stored."""
        return self.scale * self.cache_scale.key

    @property
    def value_width(self) -> int:
        """Elements of a value head, and of a head of the result."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """One layer's attention between its two projections. query_norm, key_norm: RMSNorms over each head, or None."""

    shape: LayerAttention
    query_norm: NormWeights | None
    key_norm: NormWeights | None


@dataclass(frozen=True, slots=True)
class RotaryFrequencies:
    """inverse_frequencies: [rotary_dim / 2] float32. magnitude: factor of cos and sin. axes: [rotary_dim / 2] int32,
    which of a token's three positions turns an element (None: tokens have one)."""

    inverse_frequencies: torch.Tensor
    magnitude: float
    dtype: torch.dtype
    axes: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The constants of one layer's latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) in its absorbed form.

    All heads read one vector of `rank` + `rope_dim` elements for each token: whole as the key, its first `rank`
    elements as the value. scale: multiplies query times key.
    top: keys that a token reads, chosen by an indexer (0: all).
    """

    layer: int
    num_heads: int
    rank: int
    rope_dim: int
    scale: float
    top: int = 0

    @property
    def width(self) -> int:
        """Elements of the vector."""
        return self.rank + self.rope_dim

    @property
    def as_attention(self) -> LayerAttention:
        """The same as attention of all heads over one head of keys, whose values are narrower."""
        return LayerAttention(self.layer, self.num_heads, 1, self.width, self.scale, value_dim=self.rank)


@dataclass(frozen=True, slots=True)
class ExpansionRule:
    """The rule by which a sequence's tokens are expanded: they are where that is cheaper. key_cost: multiplications
    that make a key and a value of a head. saved: multiplications that expanding saves for each query and key."""

    key_cost: int
    saved: int

    @classmethod
    def of(cls, rank: int, nope_dim: int, value_dim: int) -> ExpansionRule:
        """The rule for heads of these sizes."""
        expanded = nope_dim + value_dim
        return cls(rank * expanded, 2 * rank - expanded)

    def pays(self, num_tokens: np.ndarray, start: np.ndarray) -> np.ndarray:
        """True for each sequence whose tokens in a step, from position `start` on, are cheaper expanded: [S] bool.
        Absorbing the queries costs as much as making their keys, so that only earlier keys weigh against the saving."""
        num_pairs = num_tokens * start + num_tokens * num_tokens // 2
        return num_pairs * self.saved >= start * self.key_cost


@dataclass(frozen=True, slots=True)
class LatentExpansion:
    """A layer's matrices between latents and heads, for a model that expands prompts.

    nope_dim: elements of a head's key that are not rotated; value_dim: elements of its value. absorb: queries [T,
    num_heads * nope_dim] -> [T, num_heads * rank], against compressed vectors. values: attended vectors [T, num_heads *
    rank] -> [T, num_heads * value_dim]. parts: one for each `heads` heads, in order (the last has the rest): compressed
    vectors [N, rank] -> [N, heads * (nope_dim + value_dim)], each head's key and value. All take values of the layer's
    kind, and compute at once or record it.
    """

    nope_dim: int
    value_dim: int
    heads: int
    absorb: Callable[[Any], Any]
    values: Callable[[Any], Any]
    parts: tuple[Callable[[Any], Any], ...]

    def rule(self, shape: LatentShape) -> ExpansionRule:
        """The rule by which the layer expands."""
        return ExpansionRule.of(shape.rank, self.nope_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class IndexShape:
    """The constants of one layer's indexer (DeepSeek-V3.2), which chooses the keys that a token's attention reads.

    A key's score is scale * sum over heads of weight * relu(query · key). num_heads, dim: the queries'; keys are one
    head of `dim` elements, kept beside the latents of `latent_width`. rope_dim: number of the first elements, which are
    rotated. top: keys that are chosen, of equal scores the earlier ones.
    """

    layer: int
    num_heads: int
    dim: int
    rope_dim: int
    top: int
    latent_width: int
    scale: float


TILE = 16
"""Rows of a product: torch's products add in an order that depends on their number (`kernels/matmul.py`)."""


NORM_EPSILON = 1e-6
"""Added to the squared length of queries and keys of the delta rule."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """A float32 tensor of `shape` in the pages of `layer`, `offset` bytes from a page's beginning."""

    layer: int
    offset: int
    shape: tuple[int, ...]

    @property
    def end_offset(self) -> int:
        """Bytes of a page up to the part's end."""
        return self.offset + 4 * torch.Size(self.shape).numel()

    def blocks(self, states: StateStep) -> torch.Tensor:
        """[num_blocks, *shape], the pool's memory."""
        return states.pages[self.layer][:, self.offset : self.end_offset].view(torch.float32).unflatten(1, self.shape)


@dataclass(frozen=True, slots=True)
class ConvolutionWeights:
    """A causal convolution of each channel by itself. kernel: [width, channels] float32, the last row for the token
    itself; bias: [channels] float32 or None. activation: a name of `kernels/activation.py`, or None. layer, offset: the
    place of the last inputs in a page. num_spare: inputs kept besides the width - 1 which a token needs, for as many
    tokens to be taken back."""

    kernel: torch.Tensor
    bias: torch.Tensor | None
    activation: str | None
    layer: int
    offset: int
    num_spare: int = 0

    @property
    def num_kept(self) -> int:
        """Inputs of a page."""
        return len(self.kernel) - 1 + self.num_spare

    @property
    def inputs(self) -> StatePart:
        """[num_kept, channels]: the input of position p in row p % num_kept; rows are filled up to whole cache
        lines."""
        return StatePart(self.layer, self.offset, (self.num_kept, line_elements(self.kernel.shape[1])))


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Heads of a gated delta rule. A key head serves num_value_heads / num_key_heads successive value heads.

    rate, time_bias: [num_value_heads] float32: exp(-rate * softplus(gate + time_bias)) of the state is left by a token.
    layer, offset: the place of what is kept in a page. Rows there are filled up to whole cache lines.
    """

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
        """After the last border."""
        shape = (self.num_value_heads, self.key_dim, line_elements(self.value_dim))
        return StatePart(self.layer, self.offset, shape)

    @property
    def updates(self) -> StatePart:
        """u of `gated_delta_rule`, for each token behind the border."""
        shape = (self.num_value_heads, KEPT_ROWS, line_elements(self.value_dim))
        return StatePart(self.layer, self.state.end_offset, shape)

    @property
    def keys(self) -> StatePart:
        """The keys of the tokens behind the border."""
        shape = (self.num_key_heads, KEPT_ROWS, line_elements(self.key_dim))
        return StatePart(self.layer, self.updates.end_offset, shape)

    @property
    def decays(self) -> StatePart:
        """Logarithms, of the tokens behind the border."""
        return StatePart(self.layer, self.keys.end_offset, (self.num_value_heads, line_elements(KEPT_ROWS)))

    @property
    def end_offset(self) -> int:
        """Bytes of a page up to the last that the rule keeps."""
        return self.decays.end_offset


@dataclass(frozen=True, slots=True)
class GatedNormWeights:
    """RMSNorm of each head, then a product with the SiLU of a gate. weight: [size] in the activations' dtype."""

    size: int
    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class Routing:
    """The choice of a token's experts.

    scoring: softmax over all experts, or the sigmoid of each score. renormalise: the weights of the chosen add up to 1
    (after a softmax: the softmax over the chosen). factor: multiplies the weights. bias: [num_experts] float32, added
    to the scores for the choice alone, or None. num_groups: experts lie in that many groups of neighbours, of which the
    `top_groups` best are open to a token; a group is as good as the sum of its `group_best` best scores (DeepSeek V2:
    1, V3: 2).
    """

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
    """activation(gate) * up. activation: a name of `kernels/activation.py`. limit: the gate is cut off at it and up at
    both its signs, and 1 is added to up (GPT-OSS); None: none of these."""

    activation: str
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class RowCounts:
    """by_expert: [num_experts] int64, to which the rows that each expert computes are added. num_rows: [1] of integers,
    how many rows of a batch, its first ones, are no padding; None: all."""

    by_expert: torch.Tensor
    num_rows: torch.Tensor | None = None


ELSEWHERE = -1


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Gated feed-forward blocks, one for each expert: their matrices as `LinearMethod.create_stack` made them.

    gate_up: [2 * intermediate, size] each, gate above up; down: [size, intermediate] each. weighs_input: a token's
    weight for an expert multiplies the expert's input, else its result. counts: None: nothing is counted. places: by an
    expert's number, its place among the matrices, or ELSEWHERE: another rank holds it, and adds what it gives. Empty:
    all experts are here.
    """

    gate_up: Sequence[Any]
    down: Sequence[Any]
    gating: Gating
    weighs_input: bool = False
    counts: RowCounts | None = None
    places: Sequence[int] = ()
