"""Prompts over latents, expanded to keys and values per head in torch, a few heads and keys at a time.

Whole prompts are cheaper expanded; few tokens after a long context stay absorbed; the two forms give different bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.interface import AttentionBatch
from quire.kernels.arguments import ExpansionRule, LatentExpansion, LatentShape

PIECE_KEYS = 1024
"""Keys whose latents one call expands, a bound of scratch memory."""
TILE_ROWS = 128
"""Queries whose scores are in memory together, for all heads of a part."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Sequence whose latents a step expands. sequence: index in the batch; tokens: its tokens in the step; start:
    position of the first."""

    sequence: int
    tokens: slice
    start: int

    @property
    def num_keys(self) -> int:
        """Keys to expand: the sequence's tokens after the step."""
        return self.start + self.tokens.stop - self.tokens.start


def expanded_prompts(rule: ExpansionRule, query_start: np.ndarray, starts: np.ndarray) -> list[Prompt]:
    """Sequences of a step whose prompts are computed with expanded latents. query_start: [S + 1], first token of each
    sequence. starts: [S], positions of the first tokens."""
    counts = np.diff(query_start)
    chosen = np.flatnonzero((counts > 1) & rule.pays(counts.astype(np.int64), starts.astype(np.int64)))
    return [
        Prompt(index, slice(int(query_start[index]), int(query_start[index + 1])), int(starts[index]))
        for index in chosen.tolist()
    ]


def rest_of(batch: AttentionBatch, prompts: Sequence[Prompt]) -> tuple[torch.Tensor, AttentionBatch] | None:
    """Tokens ([N], indices) and batch of the sequences attended absorbed; None if none."""
    is_rest = torch.ones(len(batch.start_positions), dtype=torch.bool)
    is_rest[[prompt.sequence for prompt in prompts]] = False
    index = torch.nonzero(is_rest)[:, 0]
    if not len(index):
        return None
    tokens = torch.nonzero(is_rest[batch.sequence_index])[:, 0]
    counts = batch.query_start.diff()[index]
    return tokens, AttentionBatch(
        query_start=torch.cat((counts.new_zeros(1), counts.cumsum(0))),
        start_positions=batch.start_positions[index],
        slot_positions=batch.slot_positions[tokens],
        sequence_index=torch.repeat_interleave(counts),
        block_tables=tuple(table[index] for table in batch.block_tables),
        slot_mapping=tuple(slots[tokens] for slots in batch.slot_mapping),
    )


def attend_expanded(
    shape: LatentShape,
    expansion: LatentExpansion,
    query: tuple[torch.Tensor, torch.Tensor],
    kept: torch.Tensor,
    start: int,
) -> torch.Tensor:
    """Attend over one sequence, expanding its latents. query: tokens from position `start` on, [T, num_heads, nope_dim]
    and, rotated, [T, num_heads, rope_dim]. kept: latents of all its tokens, [start + T, rank + rope_dim]. Returns [T,
    num_heads * value_dim], computed in float32."""
    plain, turned = (part.transpose(0, 1).float() * shape.scale for part in query)
    latents, keys = kept[:, : shape.rank].to(query[0].dtype), kept[:, shape.rank :].float()
    out = plain.new_empty(len(kept) - start, shape.num_heads, expansion.value_dim)
    for index, expand in enumerate(expansion.parts):
        heads = slice(index * expansion.heads, (index + 1) * expansion.heads)
        _attend_part(expand, expansion, (plain[heads], turned[heads]), latents, keys, out[:, heads])
    return out.flatten(1).to(query[0].dtype)


def _attend_part(
    expand: Callable[[torch.Tensor], torch.Tensor],
    expansion: LatentExpansion,
    query: tuple[torch.Tensor, torch.Tensor],
    latents: torch.Tensor,
    turned_keys: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Attend with some heads over a sequence's expanded keys and values. query: [heads, T, dim] each, scaled. out: [T,
    heads, value_dim], written."""
    plain, turned = query
    num_heads, num_tokens = plain.shape[:2]
    start = len(latents) - num_tokens
    largest = plain.new_full((num_heads, num_tokens, 1), -torch.inf)
    total, weighted = torch.zeros_like(largest), plain.new_zeros(num_heads, num_tokens, expansion.value_dim)
    for first in range(0, len(latents), PIECE_KEYS):
        end = min(first + PIECE_KEYS, len(latents))
        expanded = expand(latents[first:end]).float().unflatten(1, (num_heads, -1)).transpose(0, 1)
        keys, values = expanded.split((expansion.nope_dim, expansion.value_dim), dim=2)
        keys = torch.cat((keys, turned_keys[first:end].expand(num_heads, -1, -1)), dim=2).transpose(1, 2)
        for row in range(max(0, first - start) // TILE_ROWS * TILE_ROWS, num_tokens, TILE_ROWS):
            rows = slice(row, min(row + TILE_ROWS, num_tokens))
            seen = min(end, start + rows.stop) - first
            if seen <= 0:
                continue
            scores = torch.bmm(torch.cat((plain[:, rows], turned[:, rows]), dim=2), keys[:, :, :seen])
            if first + seen > start + row + 1:
                positions = torch.arange(start + row, start + rows.stop, device=scores.device)[:, None]
                hidden = torch.arange(first, first + seen, device=scores.device) > positions
                scores.masked_fill_(hidden, -torch.inf)
            before = largest[:, rows]
            maximum = torch.maximum(before, scores.amax(-1, keepdim=True))
            weights, kept_share = scores.sub_(maximum).exp_(), (before - maximum).exp()
            largest[:, rows] = maximum
            total[:, rows] = total[:, rows] * kept_share + weights.sum(-1, keepdim=True)
            weighted[:, rows] = weighted[:, rows] * kept_share + torch.bmm(weights, values[:, :seen])
    out.copy_((weighted / total).transpose(0, 1))
