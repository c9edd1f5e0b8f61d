"""Paged attention over sequences with any number of new tokens, in one launch without host preparation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.attention.device_batch import DeviceBatch
from quire.kernels.arguments import LayerAttention
from quire.kernels.triton.attention_core import (
    attend_range,
    first_seen,
    load_queries,
    load_sinks,
    merged,
    no_keys,
    normalised,
    row_tokens,
    score_constants,
    split_queries,
    store_rows,
)
from quire.kernels.triton.attention_tiles import Tiles, padded_dim
from quire.kernels.triton.float8 import as_pairs
from quire.kernels.triton.runtime import BoundKernel, bind, bound

BATCH_COLUMNS = ("rows", "query_start", "seq_lens", "tables")
LAST_SEEN = "last_seen"
"""Arguments that are views of one buffer at any multiple of four bytes, without recompilation."""


@triton.jit
def find_sequence(query_start, tile, num_seqs, TOKENS: tl.constexpr):
    """Sequence of query tile `tile`: the last s with query_start[s] // TOKENS + s <= tile. Sequences have enough tile
    numbers."""
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def sequence_of_token(query_start, token, num_seqs):
    """Index of the sequence that a batch's token belongs to."""
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start + middle) <= token:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def sequence_and_keys(query_start, seq_lens, token, num_seqs):
    """Sequence of a token of the batch, and number of keys it sees, its own included."""
    sequence = sequence_of_token(query_start, token, num_seqs)
    return sequence, tl.load(seq_lens + sequence) - tl.load(query_start + sequence + 1) + token + 1


@triton.jit(do_not_specialize=["num_seqs", "skipped"], do_not_specialize_on_alignment=(*BATCH_COLUMNS, LAST_SEEN))
def _varlen_kernel(
    query,
    pages,
    out,
    rows,
    query_start,
    seq_lens,
    tables,
    sinks,
    num_seqs,
    skipped,
    query_stride,
    out_stride,
    table_stride,
    last_seen,
    scale,
    value_scale,
    cap,
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    PAIRS: tl.constexpr,
    FIXED_KEYS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Program (tile of queries, key head), most keys first. skipped: sequences with at most this many new tokens belong
    to another kernel. last_seen: see DeviceBatch, with AHEAD."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    sequence = find_sequence(query_start, tile, num_seqs, TOKENS)
    begin = tl.load(query_start + sequence)
    num_new = tl.load(query_start + sequence + 1) - begin
    # Issue all loads before using any: they arrive together.
    seq_len = tl.load(seq_lens + sequence)
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    first = (tile - begin // TOKENS - sequence) * TOKENS
    if (first >= num_new) | (num_new <= skipped):
        return
    num_tokens = tl.minimum(num_new - first, TOKENS)
    first_position = seq_len - num_new + first
    last_position = first_position + num_tokens - 1
    pages += kv_head * (HEAD_DIM // 2 if PAIRS else HEAD_DIM)
    queries = load_queries(query, query_stride, begin + first, num_tokens, kv_head, GROUP, HEAD_DIM, DIM, BLOCK_M)
    queries, odd_queries, query_factor = split_queries(queries, pages.dtype.element_ty, PAIRS)
    token, head, _ = row_tokens(BLOCK_M, GROUP)
    positions = first_position + token
    lasts, last_key = positions, last_position
    if AHEAD:
        seen = last_seen + begin + first
        lasts = tl.maximum(positions, tl.load(seen + token, mask=token < num_tokens, other=0).to(tl.int32))
        last_key = tl.maximum(last_position, tl.load(seen + num_tokens - 1).to(tl.int32))
    maximum, total, values = no_keys(BLOCK_M, DIM)
    if FIXED_KEYS:
        first_split = 0
        if WINDOW:
            first_split = tl.maximum(first_seen(first_position, window, WINDOW), 0) // FIXED_KEYS
        for split in range(bound(first_split), bound(last_key // FIXED_KEYS + 1)):
            part_maximum, part_total, part_values = no_keys(BLOCK_M, DIM)
            part_maximum, part_total, part_values = attend_range(
                queries, odd_queries, query_factor, part_maximum, part_total, part_values, pages, table, split *
                FIXED_KEYS, (split + 1) * FIXED_KEYS, first_position, last_position, last_key, positions, lasts, scale,
                cap, window, NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, WINDOW, SOFT_CAP, PAIRS,
            )  # fmt: skip
            maximum, total, values = merged(maximum, total, values, part_maximum, part_total, part_values)
    else:
        maximum, total, values = attend_range(
            queries, odd_queries, query_factor, maximum, total, values, pages, table, 0, last_key + 1,
            first_position, last_position, last_key, positions, lasts, scale, cap, window, NUM_KV_HEADS, HEAD_DIM, DIM,
            BLOCK_SIZE, BLOCK_N, WINDOW, SOFT_CAP, PAIRS,
        )  # fmt: skip
    values = normalised(maximum, total, values, load_sinks(sinks, kv_head * GROUP + head, SINKS), value_scale)
    store_rows(out, out_stride, values, begin + first, num_tokens, kv_head, GROUP, HEAD_DIM, DIM, BLOCK_M)


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Causal attention of a step's tokens over their sequences' pages. query: [T, >= num_heads * head_dim], heads
    first, any row stride. pages: [num_blocks, 2, block_size, num_kv_heads, head_dim], with the step's keys and values
    written. out: [T, num_heads * head_dim]. group: the layer's KV group. sinks: [num_heads], logits without a value in
    each head's softmax."""

    query: torch.Tensor
    pages: torch.Tensor
    out: torch.Tensor
    batch: DeviceBatch
    group: int
    layer: LayerAttention
    sinks: torch.Tensor | None = None

    @property
    def tables(self) -> torch.Tensor:
        return self.batch.block_tables[self.group]


def layer_constants(layer: LayerAttention, sinks: torch.Tensor | None) -> dict[str, Any]:
    """Compile-time arguments that the varlen and decode kernels share."""
    return {
        "NUM_KV_HEADS": layer.num_kv_heads,
        "GROUP": layer.num_heads // layer.num_kv_heads,
        "HEAD_DIM": layer.head_dim,
        "DIM": padded_dim(layer.head_dim),
        "WINDOW": 0 if layer.window is None else 2 if layer.is_chunked else 1,
        "SINKS": sinks is not None,
    }


def launch_over(kernel: BoundKernel, work: PagedAttention, tokens: int, skipped: int, *more: torch.Tensor) -> None:
    """Launch a program per query tile and key head. tokens: per tile. skipped: sequences with at most that many new
    tokens are skipped. more: further arguments of the kernel."""
    batch, query, out, tables = work.batch, work.query, work.out, work.tables
    kernel(
        (batch.num_tokens // tokens + batch.num_seqs, work.layer.num_kv_heads),
        query,
        out,
        batch.rows,
        batch.query_start,
        batch.seq_lens,
        tables,
        batch.num_seqs,
        skipped,
        query.stride(0),
        out.stride(0),
        tables.stride(0),
        *more,
    )


class VarlenAttention:
    """`PagedAttention` by one kernel, bound to one layer, its pages and one kind of tiles."""

    def __init__(
        self,
        layer: LayerAttention,
        pages: torch.Tensor,
        sinks: torch.Tensor | None,
        tiles: Tiles,
        *,
        sees_ahead: bool = False,
    ) -> None:
        """Kernel bound to one layer. sees_ahead: for batches with `last_seen`."""
        self._sees_ahead = sees_ahead
        self._tokens = tiles.tokens(layer.num_heads // layer.num_kv_heads)
        scale, cap, window = score_constants(layer)
        self._launch = bind(
            _varlen_kernel,
            {
                "pages": as_pairs(pages),
                "sinks": sinks,
                "scale": scale,
                "value_scale": layer.cache_scale.value,
                "cap": cap,
                "window": window,
                **({} if sees_ahead else {LAST_SEEN: None}),
            },
            **layer_constants(layer, sinks),
            AHEAD=sees_ahead,
            BLOCK_SIZE=pages.shape[2],
            PAIRS=pages.dtype.itemsize == 1,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            SOFT_CAP=layer.soft_cap is not None,
            FIXED_KEYS=tiles.fixed_keys,
            **tiles.settings,
        )

    def launch(self, work: PagedAttention, skipped: int) -> None:
        more = []
        if self._sees_ahead:
            assert work.batch.last_seen is not None, "the batch says what its tokens see"
            more.append(work.batch.last_seen)
        launch_over(self._launch, work, self._tokens, skipped, *more)


def varlen_attention(work: PagedAttention, tiles: Tiles, skipped: int = 0) -> None:
    """Launch VarlenAttention's kernel. skipped: see `launch_over`."""
    sees_ahead = work.batch.last_seen is not None
    VarlenAttention(work.layer, work.pages, work.sinks, tiles, sees_ahead=sees_ahead).launch(work, skipped)
