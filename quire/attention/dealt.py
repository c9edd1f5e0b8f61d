"""Attention of ranks with the same key heads and a part of a sequence's tokens each. A rank attends to its own tokens
with its neighbours' query heads too; then each head's partial results are merged by their sums of weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quire.kv_cache.deal import Deal
from quire.parallel.interface import ProcessGroup


@dataclass(frozen=True)
class DealtTokens:
    """Exchange between ranks that share a sequence's tokens (attention back ends call it). deal: distribution of tokens
    over ranks. group: ranks that share each layer, of which `deal.num_ranks` neighbours share the tokens."""

    deal: Deal
    group: ProcessGroup

    @property
    def first(self) -> int:
        """Number in `group` of the first rank that shares the tokens."""
        return self.group.rank - self.deal.rank

    def gather(self, width: int, x: torch.Tensor) -> torch.Tensor:
        """First `width` columns of the neighbours' x (queries before attention), [T, any], side by side."""
        return torch.cat(self._parts(x[:, :width]), dim=1)

    def merge(self, num_heads: int, head_dim: int, parts: torch.Tensor) -> torch.Tensor:
        """Merge the partial results of this rank's query heads from all ranks: [T, num_heads * head_dim]. parts: [T,
        heads * (head_dim + 1)] (see `merge_parts`), gathered from the ranks."""
        first = self.deal.rank * num_heads
        return merge_parts(self._parts(parts), first, num_heads, head_dim)

    def _parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        every = self.group.all_gather(x.contiguous()[None], dim=0)
        return list(every[self.first : self.first + self.deal.num_ranks])


def merge_parts(parts: list[torch.Tensor], first: int, num_heads: int, head_dim: int) -> torch.Tensor:
    """`SharedRanks::merge_parts` in torch, with the same bits. parts: one per rank, [T, heads * (head_dim + 1)]: the
    results of all heads, then the logarithm of each head's sum of weights. first: number of the first of `num_heads`
    heads. Returns [T, num_heads * head_dim] float32."""
    heads = parts[0].shape[1] // (head_dim + 1)
    own = slice(first, first + num_heads)
    sums = [part[:, heads * head_dim :][:, own] for part in parts]
    top = sums[0]
    for other in sums[1:]:
        top = torch.where(other > top, other, top)
    weights = [_exponentials(each - top) for each in sums]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    merged = torch.zeros(0)
    for rank, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        rows = part[:, : heads * head_dim].unflatten(1, (heads, head_dim))[:, own] * (weight / total)[..., None]
        merged = rows if rank == 0 else merged + rows
    return merged.flatten(1)


def _exponentials(values: torch.Tensor) -> torch.Tensor:
    """Exponentials from the C library, for the native merge's bits."""
    found = [math.exp(value) if value == value else value for value in values.double().flatten().tolist()]
    return torch.tensor(found, dtype=torch.float64).view(values.shape).float()
