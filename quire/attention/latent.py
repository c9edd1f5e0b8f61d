"""What attention back ends are told of a layer of latent attention."""

from __future__ import annotations

from dataclasses import dataclass

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
