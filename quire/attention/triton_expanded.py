"""Expanded prompts over latents on a device: keys and values of a few heads go to scratch pages, over which the prompt
kernel runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch

from quire.attention.device_batch import DeviceBatch
from quire.attention.expanded import Prompt, expanded_prompts
from quire.kernels.arguments import LatentExpansion, LatentShape, LayerAttention
from quire.kernels.rotation import DeviceRotation
from quire.kernels.triton.attention_tiles import DeviceLimits, HeadShape, Tiles, varlen_tiles
from quire.kernels.triton.latent_attention import LatentKernels
from quire.kernels.triton.paged_attention import PagedAttention, VarlenAttention

Inputs: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class DeviceExpansion:
    """Attends with expanded prompts, in scratch of all layers for `max_num_keys` keys and part of the heads, allocated
    at first use."""

    def __init__(self, max_num_keys: int, limits: DeviceLimits) -> None:
        self._max_num_keys = max_num_keys
        self._limits = limits
        self._scratch: torch.Tensor | None = None
        self._kernels: dict[tuple[LayerAttention, Tiles], VarlenAttention] = {}

    def compute(
        self,
        shape: LatentShape,
        expansion: LatentExpansion,
        inputs: Inputs,
        rotation: DeviceRotation | None,
        out: torch.Tensor | None,
        batch: DeviceBatch,
        layer: tuple[LatentKernels, int, torch.Tensor],
    ) -> torch.Tensor:
        """Attend with prompts expanded and other tokens absorbed (`AttentionStep.attend_expanded`). layer: its kernels,
        KV group and pages."""
        kernels, group, pages = layer
        query, turned_query, latent, turned_key = inputs
        kernels.prepare(turned_query, latent, turned_key, rotation, batch, group)
        prompts = self._prompts(shape, expansion, batch)
        if not prompts:
            absorbed = expansion.absorb(query)
            attended = torch.empty_like(absorbed)
            kernels.attend_written(absorbed, turned_query, attended, batch, group)
            values: torch.Tensor = expansion.values(attended)
            return values if out is None else out.copy_(values)
        if out is None:
            out = query.new_empty(len(query), shape.num_heads * expansion.value_dim)
        rest = _rest(batch, prompts)
        if rest is not None:
            tokens, sequences = rest
            absorbed = expansion.absorb(query.index_select(0, tokens))
            attended = torch.empty_like(absorbed)
            kernels.attend_written(absorbed, turned_query.index_select(0, tokens), attended, sequences, group)
            out.index_copy_(0, tokens, expansion.values(attended))
        for lot in self._lots(prompts, pages.shape[1]):
            kept, lengths = _gather(lot, pages, batch, group, shape.width)
            for part in range(len(expansion.parts)):
                self._attend_part(part, shape, expansion, (query, turned_query), kept, (lot, lengths), out)
        return out

    def _attend_part(
        self,
        part: int,
        shape: LatentShape,
        expansion: LatentExpansion,
        query: tuple[torch.Tensor, torch.Tensor],
        kept: torch.Tensor,
        work: tuple[Sequence[Prompt], DeviceBatch],
        out: torch.Tensor,
    ) -> None:
        """Attend with one part of the heads. query: both parts of the step's queries, the second rotated. kept:
        [blocks, block_size, width], the prompts' latents."""
        lot, batch = work
        first = part * expansion.heads
        num_heads = min(expansion.heads, shape.num_heads - first)
        nope, value_dim = expansion.nope_dim, expansion.value_dim
        dim = max(nope + shape.rope_dim, value_dim)
        dtype = query[0].dtype
        latents = kept[..., : shape.rank].to(dtype).flatten(0, 1)
        expanded = expansion.parts[part](latents).view(*kept.shape[:2], num_heads, nope + value_dim)
        pages = self._pages(len(kept), kept.shape[1], num_heads, expansion.heads, dim, expanded)
        pages[:, 0, :, :, :nope] = expanded[..., :nope]
        pages[:, 0, :, :, nope : nope + shape.rope_dim] = kept[..., None, shape.rank :].to(dtype)
        pages[:, 0, :, :, nope + shape.rope_dim :] = 0
        pages[:, 1, :, :, :value_dim] = expanded[..., nope:]
        pages[:, 1, :, :, value_dim:] = 0
        widths = (nope, shape.rope_dim)
        rows = query[0].new_zeros(batch.num_tokens, num_heads, dim)
        begin = 0
        for prompt in lot:
            count = prompt.tokens.stop - prompt.tokens.start
            for at, each, width in zip((0, nope), query, widths, strict=True):
                heads = each[prompt.tokens].unflatten(1, (shape.num_heads, width))
                rows[begin : begin + count, :, at : at + width] = heads[:, first : first + num_heads]
            begin += count
        layer = LayerAttention(0, num_heads, num_heads, dim, shape.scale)
        heads_of = HeadShape(num_heads, num_heads, dim, dtype.itemsize)
        tiles = varlen_tiles(heads_of, batch.max_query_len, batch.max_seq_len, self._limits)
        attended = torch.empty_like(rows).flatten(1)
        kernel = self._kernels.get((layer, tiles))
        if kernel is None:
            kernel = self._kernels[layer, tiles] = VarlenAttention(layer, pages, None, tiles)
        kernel.launch(PagedAttention(rows.flatten(1), pages, attended, batch, 0, layer), skipped=0)
        results = attended.unflatten(1, (num_heads, dim))[..., :value_dim].flatten(1)
        columns = slice(first * value_dim, (first + num_heads) * value_dim)
        begin = 0
        for prompt in lot:
            count = prompt.tokens.stop - prompt.tokens.start
            out[prompt.tokens, columns] = results[begin : begin + count]
            begin += count

    def _prompts(self, shape: LatentShape, expansion: LatentExpansion, batch: DeviceBatch) -> list[Prompt]:
        if batch.max_query_len == 1:
            return []
        assert batch.host is not None, "a step with prompts says where they begin"
        query_start, starts, num_drafts = batch.host
        prompts = expanded_prompts(expansion.rule(shape), query_start, starts)
        return prompts if num_drafts is None else [each for each in prompts if not num_drafts[each.sequence]]

    def _lots(self, prompts: Sequence[Prompt], block_size: int) -> list[list[Prompt]]:
        """Runs of prompts whose keys fit in the scratch together."""
        lots: list[list[Prompt]] = []
        room = 0
        for prompt in prompts:
            taken = _blocks(prompt, block_size)
            if taken > room:
                lots.append([])
                room = self._capacity(block_size)
            lots[-1].append(prompt)
            room -= taken
        return lots

    def _capacity(self, block_size: int) -> int:
        return -(-self._max_num_keys // block_size)

    def _pages(
        self, num_blocks: int, block_size: int, num_heads: int, most_heads: int, dim: int, like: torch.Tensor
    ) -> torch.Tensor:
        """View of the scratch as expanded pages, [num_blocks, 2, block_size, num_heads, dim]."""
        capacity = self._capacity(block_size) * 2 * block_size * most_heads * dim
        if self._scratch is None:
            self._scratch = torch.zeros(capacity, dtype=like.dtype, device=like.device)
        assert len(self._scratch) == capacity, "layers are of one shape"
        size = num_blocks * 2 * block_size * num_heads * dim
        return self._scratch[:size].view(num_blocks, 2, block_size, num_heads, dim)


def _blocks(prompt: Prompt, block_size: int) -> int:
    return -(-prompt.num_keys // block_size)


def _gather(
    lot: Sequence[Prompt], pages: torch.Tensor, batch: DeviceBatch, group: int, width: int
) -> tuple[torch.Tensor, DeviceBatch]:
    """Latents of some prompts by block, [blocks, block_size, width], and their batch over pages in that order."""
    block_size, device = pages.shape[1], pages.device
    if pages.dtype == torch.uint8:
        pages = pages.view(torch.float8_e4m3fn)
    tables, counts = batch.block_tables[group], [_blocks(prompt, block_size) for prompt in lot]
    found = [
        pages[tables[batch.rows[prompt.sequence].long()][:count].long()][..., :width]
        for prompt, count in zip(lot, counts, strict=True)
    ]
    ends = np.cumsum(counts)
    places = np.zeros((len(lot), max(counts)), np.int32)
    for row, (end, count) in enumerate(zip(ends, counts, strict=True)):
        places[row, :count] = np.arange(end - count, end)
    lengths = np.array([prompt.tokens.stop - prompt.tokens.start for prompt in lot])
    num_keys = np.array([prompt.num_keys for prompt in lot])
    return torch.cat(found), DeviceBatch(
        num_seqs=len(lot),
        num_tokens=int(lengths.sum()),
        max_query_len=int(lengths.max()),
        max_seq_len=int(num_keys.max()),
        rows=torch.arange(len(lot), dtype=torch.int32, device=device),
        query_start=_column(np.concatenate(([0], lengths.cumsum())), device),
        seq_lens=_column(num_keys, device),
        slot_positions=batch.slot_positions,
        slot_mapping=(),
        block_tables=(torch.from_numpy(places).to(device),),
    )


def _rest(batch: DeviceBatch, prompts: Sequence[Prompt]) -> tuple[torch.Tensor, DeviceBatch] | None:
    """Tokens ([N], indices) and batch of the sequences not expanded; None if none."""
    assert batch.host is not None, "a step with prompts says where they begin"
    starts = batch.host.query_start
    index = np.setdiff1d(np.arange(len(starts) - 1), [prompt.sequence for prompt in prompts])
    if not len(index):
        return None
    counts = np.diff(starts)[index]
    device = batch.rows.device
    tokens = _column(np.concatenate([np.arange(starts[s], starts[s + 1]) for s in index]), device, torch.int64)
    chosen = _column(index, device, torch.int64)
    return tokens, replace(
        batch,
        num_seqs=len(index),
        num_tokens=len(tokens),
        max_query_len=int(counts.max()),
        rows=batch.rows.index_select(0, chosen),
        query_start=_column(np.concatenate(([0], counts.cumsum())), device),
        seq_lens=batch.seq_lens.index_select(0, chosen),
        slot_positions=batch.slot_positions.index_select(0, tokens),
        host=None,
    )


def _column(values: np.ndarray, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.from_numpy(values).to(dtype).to(device, non_blocking=True)
