"""Operations over the KV cache besides `Operations.attend`: writing and attending apart, and latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from quire.attention.expanded import ExpandingStep, attend_expanded
from quire.attention.interface import AttentionStep
from quire.attention.latent import IndexShape, LatentExpansion, LatentShape

if TYPE_CHECKING:
    from quire.kernels.arguments import HeadWeights, NormWeights
    from quire.layers.rotation import Rotation

ValueT = TypeVar("ValueT")
RotationT_contra = TypeVar("RotationT_contra", contravariant=True)
StepT_contra = TypeVar("StepT_contra", contravariant=True)


class CacheOperations(Protocol[ValueT, RotationT_contra, StepT_contra]):
    """A part of `Operations`. rotation: of the tokens' positions (None: none is applied); step: of an attention back
    end."""

    def write_kv(
        self, heads: HeadWeights, key_value: ValueT, rotation: RotationT_contra | None, step: StepT_contra
    ) -> None:
        """Norm and rotate key heads, and write keys and values to the pages of `heads.shape.layer`. key_value: [T,
        num_kv_heads * (head_dim + value_width)], key and value heads; used up."""
        ...

    def attend_cached(
        self, heads: HeadWeights, query: ValueT, rotation: RotationT_contra | None, step: StepT_contra
    ) -> ValueT:
        """Norm and rotate query heads, and attend over what the pages of `heads.shape.layer` hold, which that layer, or
        an earlier one in its place, has written for this step's tokens too. query: [T, num_heads * head_dim]; used up.
        Returns [T, num_heads * value_width]."""
        ...

    def attend_latent(
        self,
        shape: LatentShape,
        inputs: tuple[ValueT, ValueT, ValueT, ValueT],
        rotation: RotationT_contra | None,
        step: StepT_contra,
        selected: ValueT | None = None,
    ) -> ValueT:
        """Rotate, write the tokens' latents to their pages, and attend. selected: of `select_keys`, if shape.top.

        inputs: queries against the compressed part [T, num_heads * rank] and against the rotated part [T, num_heads *
        rope_dim], the tokens' own compressed vectors [T, rank] and rotated keys [T, rope_dim]; used up. Returns [T,
        num_heads * rank].
        """
        ...

    def attend_expanded(
        self,
        shape: LatentShape,
        expansion: LatentExpansion,
        inputs: tuple[ValueT, ValueT, ValueT, ValueT],
        rotation: RotationT_contra | None,
        step: StepT_contra,
    ) -> ValueT:
        """As `attend_latent`, where prompts are computed with keys and values of each head if that is cheaper
        (`ExpansionRule`), and other tokens in the absorbed form. inputs: as there, but for the queries, which are [T,
        num_heads * nope_dim]. Returns [T, num_heads * value_dim]."""
        ...

    def check_latent(self, shape: LatentShape) -> None:
        """Raises ConfigError for latents that `attend_latent` does not compute."""
        ...

    def select_keys(
        self,
        shape: IndexShape,
        inputs: tuple[ValueT, ValueT, ValueT],
        rotation: RotationT_contra | None,
        step: StepT_contra,
    ) -> ValueT:
        """Rotate, write the tokens' keys to their pages, and choose the keys that each token reads.

        inputs: queries [T, num_heads * dim] and keys [T, dim], used up, and the heads' weights [T, num_heads]. Returns
        [T, top]: positions, ascending; rows of tokens that see at most `top` keys, and read all, hold anything.
        """
        ...

    def check_index(self, shape: IndexShape) -> None:
        """Raises ConfigError for an indexer that `select_keys` does not compute."""
        ...


class TorchCacheOperations:
    """CacheOperations in plain torch."""

    def norm(self, weights: NormWeights, x: torch.Tensor) -> torch.Tensor:
        """As `Operations.norm`."""
        raise NotImplementedError

    def write_kv(
        self, heads: HeadWeights, key_value: torch.Tensor, rotation: Rotation | None, step: AttentionStep
    ) -> None:
        shape = heads.shape
        key, value = key_value.split((shape.num_kv_heads * shape.head_dim, shape.num_kv_heads * shape.value_width), 1)
        key = self._prepared(key.unflatten(1, (-1, shape.head_dim)), heads.key_norm, rotation)
        step.write_kv(shape, key, value.unflatten(1, (-1, shape.value_width)))

    def attend_cached(
        self, heads: HeadWeights, query: torch.Tensor, rotation: Rotation | None, step: AttentionStep
    ) -> torch.Tensor:
        query = self._prepared(query.unflatten(1, (-1, heads.shape.head_dim)), heads.query_norm, rotation)
        return step.attend_cached(heads.shape, query).flatten(1)

    def attend_latent(
        self,
        shape: LatentShape,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotation | None,
        step: AttentionStep,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query, turned_query = inputs[0], self._write_latent(shape, inputs, rotation, step)
        query = torch.cat((query.unflatten(1, (shape.num_heads, shape.rank)), turned_query), dim=2)
        if selected is not None:
            return step.attend_selected(shape.as_attention, query, selected).flatten(1)
        return step.attend_cached(shape.as_attention, query).flatten(1)

    def _write_latent(
        self,
        shape: LatentShape,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotation | None,
        step: AttentionStep,
    ) -> torch.Tensor:
        """Keep the latents with their rotated keys. Returns the rotated parts of queries, [T, num_heads, rope_dim]."""
        _, turned_query, latent, turned_key = inputs
        turned_key = self._prepared(turned_key[:, None], None, rotation)
        step.write_latent(shape.layer, torch.cat((latent, turned_key[:, 0]), dim=1))
        return self._prepared(turned_query.unflatten(1, (shape.num_heads, shape.rope_dim)), None, rotation)

    def attend_expanded(
        self,
        shape: LatentShape,
        expansion: LatentExpansion,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotation | None,
        step: ExpandingStep,
    ) -> torch.Tensor:
        query, turned_query = inputs[0], self._write_latent(shape, inputs, rotation, step)
        out = query.new_empty(len(query), shape.num_heads * expansion.value_dim)
        prompts, rest = step.split(expansion.rule(shape))
        if rest is not None:
            absorbed = expansion.absorb(query[rest.tokens]).unflatten(1, (shape.num_heads, shape.rank))
            absorbed = torch.cat((absorbed, turned_query[rest.tokens]), dim=2)
            out[rest.tokens] = expansion.values(rest.step.attend_cached(shape.as_attention, absorbed).flatten(1))
        query = query.unflatten(1, (shape.num_heads, expansion.nope_dim))
        for prompt in prompts:
            kept = step.latents(shape.layer, prompt, shape.width)
            out[prompt.tokens] = attend_expanded(
                shape, expansion, (query[prompt.tokens], turned_query[prompt.tokens]), kept, prompt.start
            )
        return out

    def check_latent(self, shape: LatentShape) -> None:
        """All are computed."""

    def select_keys(
        self,
        shape: IndexShape,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotation | None,
        step: AttentionStep,
    ) -> torch.Tensor:
        query, key, weights = inputs
        query = self._prepared(query.unflatten(1, (shape.num_heads, shape.dim)), None, rotation)
        step.write_index(shape, self._prepared(key[:, None], None, rotation)[:, 0])
        return step.select_keys(shape, query, weights)

    def check_index(self, shape: IndexShape) -> None:
        """All are computed."""

    def _prepared(self, heads: torch.Tensor, norm: NormWeights | None, rotation: Rotation | None) -> torch.Tensor:
        """[T, heads, dim], normed and rotated."""
        if norm is not None:
            heads = self.norm(norm, heads)
        return heads if rotation is None else rotation.apply(heads)
