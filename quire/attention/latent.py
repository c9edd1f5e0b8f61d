"""What attention back ends are told of a layer of latent attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.attention.interface import LayerAttention


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
    """When a sequence's tokens are cheaper expanded. key_cost: multiplications that make a key and a value of a head;
    saved: of each query and key."""

    key_cost: int
    saved: int

    @classmethod
    def of(cls, rank: int, nope_dim: int, value_dim: int) -> ExpansionRule:
        """For heads of these sizes."""
        expanded = nope_dim + value_dim
        return cls(rank * expanded, 2 * rank - expanded)

    def pays(self, num_tokens: np.ndarray, start: np.ndarray) -> np.ndarray:
        """For the tokens of each sequence in a step, from position `start` on. Absorbing the queries costs as much as
        making their keys, so that only earlier keys weigh against the saving."""
        num_pairs = num_tokens * start + num_tokens * num_tokens // 2
        return num_pairs * self.saved >= start * self.key_cost


@dataclass(frozen=True, slots=True)
class LatentExpansion:
    """A layer's matrices between latents and heads, for a model that expands prompts.

    nope_dim: elements of a head's key that are not rotated; value_dim: of its value. absorb: queries [T, num_heads *
    nope_dim] -> [T, num_heads * rank], against compressed vectors. values: attended vectors [T, num_heads * rank] ->
    [T, num_heads * value_dim]. parts: of the heads, in order, `heads` of them each (the last: what is left): compressed
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
        """When the layer expands."""
        return ExpansionRule.of(shape.rank, self.nope_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class IndexShape:
    """The constants of one layer's indexer (DeepSeek-V3.2), which chooses the keys that a token's attention reads.

    A key's score is scale * sum over heads of weight * relu(query · key). num_heads, dim: of queries; keys are one head
    of `dim` elements, kept beside the latents of `latent_width`. rope_dim: of the first elements, which are rotated.
    top: keys that are chosen, of equal scores the earlier ones.
    """

    layer: int
    num_heads: int
    dim: int
    rope_dim: int
    top: int
    latent_width: int
    scale: float
