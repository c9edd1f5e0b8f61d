"""Paged attention of sequences with few new tokens: a sequence's keys are split over programs (split-KV)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

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
from quire.kernels.triton.attention_tiles import MAX_SPLITS, SplitPlan, Tiles
from quire.kernels.triton.float8 import as_pairs
from quire.kernels.triton.paged_attention import BATCH_COLUMNS, PagedAttention, layer_constants
from quire.kernels.triton.runtime import bind, bound, next_power_of_2

UNROLLED = 8
"""Fixed splits that the reduction loads together; they are merged in order."""
FEW_PARTS = 8
"""Maximum splits with which a program merges all heads of a group; above, one head."""


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Partial results of all splits, for each layer in turn. float32: values [rows, head_dim], maxima and totals
    [rows]; rows: `attention_tiles.scratch_rows`."""

    values: torch.Tensor
    maxima: torch.Tensor
    totals: torch.Tensor

    @classmethod
    def allocate(cls, num_rows: int, head_dim: int, device: torch.device) -> SplitScratch:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        return cls(empty(num_rows, head_dim), empty(num_rows), empty(num_rows))


@triton.jit
def _splits(seq_len, num_new, num_programs, min_keys, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
            FIXED_KEYS: tl.constexpr):  # fmt: skip
    """First key of a sequence's first split, keys per split, and number of splits."""
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_seen(seq_len - num_new, window, WINDOW), 0)
    if FIXED_KEYS:
        begin = begin // FIXED_KEYS * FIXED_KEYS
        keys = FIXED_KEYS
    else:
        begin = begin // BLOCK_N * BLOCK_N
        tiles = tl.cdiv(seq_len - begin, BLOCK_N)
        keys = tl.maximum(tl.cdiv(tiles, num_programs) * BLOCK_N, min_keys)
    return begin, keys, tl.cdiv(seq_len - begin, keys)


@triton.jit(
    do_not_specialize=["capacity", "min_keys"],
    do_not_specialize_on_alignment=BATCH_COLUMNS,
)
def _split_kernel(
    query,
    pages,
    out,
    part_values,
    part_maxima,
    part_totals,
    rows,
    query_start,
    seq_lens,
    tables,
    sinks,
    query_stride,
    out_stride,
    table_stride,
    capacity,
    min_keys,
    scale,
    cap,
    window,
    value_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    PAIRS: tl.constexpr,
    FIXED_KEYS: tl.constexpr,
):
    """Attends to splits. Program (key head, sequence, split and every num_programs-th after it)."""
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1)
    begin = tl.load(query_start + sequence)
    num_new = tl.load(query_start + sequence + 1) - begin
    # Issue all loads before using any: they arrive together.
    seq_len = tl.load(seq_lens + sequence)
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    if (num_new == 0) | (num_new > TOKENS):
        return
    first_key, keys, num_splits = _splits(
        seq_len, num_new, tl.num_programs(2), min_keys, window, BLOCK_N, WINDOW, FIXED_KEYS
    )
    pages += kv_head * (HEAD_DIM // 2 if PAIRS else HEAD_DIM)
    queries = load_queries(query, query_stride, begin, num_new, kv_head, GROUP, HEAD_DIM, DIM, BLOCK_M)
    queries, odd_queries, query_factor = split_queries(queries, pages.dtype.element_ty, PAIRS)
    token, head, _ = row_tokens(BLOCK_M, GROUP)
    row = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM)
    for split in range(bound(tl.program_id(2)), bound(num_splits), bound(tl.num_programs(2))):
        start = first_key + split * keys
        maximum, total, values = no_keys(BLOCK_M, DIM)
        maximum, total, values = attend_range(
            queries, odd_queries, query_factor, maximum, total, values, pages, table, start, tl.minimum(start + keys,
            seq_len), seq_len - num_new, seq_len - 1, seq_len - 1, seq_len - num_new + token, seq_len - num_new +
            token, scale, cap, window, NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, WINDOW, SOFT_CAP, PAIRS,
        )  # fmt: skip
        if num_splits == 1:
            if FIXED_KEYS:
                # Merge with an empty part, like the varlen kernel: this turns -0 into 0.
                nothing_maximum, nothing_total, nothing = no_keys(BLOCK_M, DIM)
                maximum, total, values = merged(nothing_maximum, nothing_total, nothing, maximum, total, values)
            values = normalised(maximum, total, values, load_sinks(sinks, kv_head * GROUP + head, SINKS), value_scale)
            store_rows(out, out_stride, values, begin, num_new, kv_head, GROUP, HEAD_DIM, DIM, BLOCK_M)
        else:
            place = ((sequence * NUM_KV_HEADS + kv_head).to(tl.int64) * capacity + split) * (TOKENS * GROUP)
            mask = row < num_new * GROUP
            tl.store(part_maxima + place + row, maximum, mask=mask)
            tl.store(part_totals + place + row, total, mask=mask)
            tl.store(
                part_values + (place + row)[:, None] * HEAD_DIM + dims[None, :],
                values,
                mask=mask[:, None] & (dims < HEAD_DIM)[None, :],
            )


@triton.jit
def _merged_at_once(part_values, part_maxima, part_totals, place, stride, num_splits, inside, HEAD_DIM: tl.constexpr,
                    DIM: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Softmax over all splits of some heads. place: [heads], of their first split; `stride`: rows to the next."""
    part = tl.arange(0, PARTS)
    dims = tl.arange(0, DIM)
    present = (part < num_splits)[:, None] & inside[None, :]
    at = place[None, :] + part[:, None] * stride
    maxima = tl.load(part_maxima + at, mask=present, other=-1.0e30)
    totals = tl.load(part_totals + at, mask=present, other=0.0)
    values = tl.load(
        part_values + at[:, :, None] * HEAD_DIM + dims[None, None, :],
        mask=present[:, :, None] & (dims < HEAD_DIM)[None, None, :],
        other=0.0,
    )
    maximum = tl.max(maxima, 0)
    factor = tl.exp2(maxima - maximum[None, :])
    return maximum, tl.sum(totals * factor, 0), tl.sum(values * factor[:, :, None], 0)


@triton.jit(
    do_not_specialize=["num_programs", "capacity", "min_keys"],
    do_not_specialize_on_alignment=BATCH_COLUMNS,
)
def _merge_kernel(
    out,
    part_values,
    part_maxima,
    part_totals,
    query_start,
    seq_lens,
    sinks,
    out_stride,
    num_programs,
    capacity,
    min_keys,
    window,
    value_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    FIXED_KEYS: tl.constexpr,
    UNROLLED: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merges splits to `out`. Program (HEADS query heads of a group: one or at least all; sequence; its token). PARTS:
    at least the number of splits."""
    sequence = tl.program_id(1)
    token = tl.program_id(2)
    begin = tl.load(query_start + sequence)
    num_new = tl.load(query_start + sequence + 1) - begin
    seq_len = tl.load(seq_lens + sequence)
    if (token >= num_new) | (num_new > TOKENS):
        return
    _, _, num_splits = _splits(seq_len, num_new, num_programs, min_keys, window, BLOCK_N, WINDOW, FIXED_KEYS)
    if num_splits == 1:
        return
    PROGRAMS: tl.constexpr = GROUP if HEADS == 1 else 1
    kv_head = tl.program_id(0) // PROGRAMS
    head = tl.program_id(0) % PROGRAMS + tl.arange(0, HEADS)
    inside = head < GROUP
    place = (sequence * NUM_KV_HEADS + kv_head).to(tl.int64) * capacity * (TOKENS * GROUP)
    place += token * GROUP + head
    dims = tl.arange(0, DIM)
    if FIXED_KEYS:
        maximum, total, values = no_keys(HEADS, DIM)
        for first in range(0, bound(num_splits), UNROLLED):
            for ahead in tl.static_range(UNROLLED):
                present = inside & (first + ahead < num_splits)
                at = place + (first + ahead) * (TOKENS * GROUP)
                # A missing part merges like one without visible keys.
                maximum, total, values = merged(
                    maximum,
                    total,
                    values,
                    tl.load(part_maxima + at, mask=present, other=-1.0e30),
                    tl.load(part_totals + at, mask=present, other=0.0),
                    tl.load(
                        part_values + at[:, None] * HEAD_DIM + dims[None, :],
                        mask=present[:, None] & (dims < HEAD_DIM)[None, :],
                        other=0.0,
                    ),
                )
    else:
        maximum, total, values = _merged_at_once(
            part_values, part_maxima, part_totals, place, TOKENS * GROUP, num_splits, inside, HEAD_DIM, DIM, PARTS
        )
    query_head = kv_head * GROUP + head
    sink = load_sinks(sinks, tl.where(inside, query_head, 0), SINKS)
    values = normalised(maximum, total, values, sink, value_scale)
    at = (begin + token).to(tl.int64) * out_stride + query_head * HEAD_DIM
    mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + at[:, None] + dims[None, :], values.to(out.dtype.element_ty), mask=mask)


class SplitAttention:
    """Split-KV attention of one layer: both kernels bound to its pages and one kind of tiles. tokens: see
    `SplitPlan.tokens`."""

    def __init__(
        self,
        layer: LayerAttention,
        pages: torch.Tensor,
        sinks: torch.Tensor | None,
        tiles: Tiles,
        tokens: int,
        scratch: SplitScratch,
    ) -> None:
        self._num_heads, self._num_kv_heads = layer.num_heads, layer.num_kv_heads
        scale, cap, window = score_constants(layer)
        constants = layer_constants(layer, sinks) | {
            "BLOCK_N": tiles.block_n,
            "TOKENS": tokens,
            "FIXED_KEYS": tiles.fixed_keys,
        }
        fixed = {
            "part_values": scratch.values,
            "part_maxima": scratch.maxima,
            "part_totals": scratch.totals,
            "sinks": sinks,
            "window": window,
            "value_scale": layer.cache_scale.value,
        }
        self._split = bind(
            _split_kernel,
            {**fixed, "pages": as_pairs(pages), "scale": scale, "cap": cap},
            **constants,
            BLOCK_SIZE=pages.shape[2],
            PAIRS=pages.dtype.itemsize == 1,
            BLOCK_M=tiles.block_m,
            SOFT_CAP=layer.soft_cap is not None,
            **tiles.settings,
        )
        group = layer.num_heads // layer.num_kv_heads
        one = {"HEADS": 1, "PARTS": MAX_SPLITS, "num_warps": 1 if tiles.fixed_keys else 4}
        few = one if tiles.fixed_keys else {"HEADS": next_power_of_2(group), "PARTS": FEW_PARTS, "num_warps": 4}
        self._merge_many, self._merge_few = (
            (
                self._num_heads if shape["HEADS"] == 1 else self._num_kv_heads,
                bind(_merge_kernel, fixed, **constants, UNROLLED=UNROLLED, **shape),
            )
            for shape in (one, few)
        )
        self._has_merged = False

    def launch(self, work: PagedAttention, plan: SplitPlan) -> None:
        batch, query, out, tables = work.batch, work.query, work.out, work.tables
        self._split(
            (self._num_kv_heads, batch.num_seqs, plan.num_programs),
            query,
            out,
            batch.rows,
            batch.query_start,
            batch.seq_lens,
            tables,
            query.stride(0),
            out.stride(0),
            tables.stride(0),
            plan.capacity,
            plan.min_keys,
        )
        if plan.capacity > 1:
            fitting = self._merge_few if plan.capacity <= FEW_PARTS else self._merge_many
            # The first run, in the warm-up, launches both kernels, the fitting one last: later batches compile nothing.
            both = () if self._has_merged else (self._merge_many, self._merge_few)
            self._has_merged = True
            for programs, merge in (*both, fitting):
                merge(
                    (programs, batch.num_seqs, min(plan.tokens, batch.max_query_len)),
                    out,
                    batch.query_start,
                    batch.seq_lens,
                    out.stride(0),
                    plan.num_programs,
                    plan.capacity,
                    plan.min_keys,
                )


def split_attention(work: PagedAttention, plan: SplitPlan, scratch: SplitScratch) -> None:
    """`varlen_attention` for sequences with at most `plan.tokens` new tokens; others are skipped."""
    SplitAttention(work.layer, work.pages, work.sinks, plan.tiles, plan.tokens, scratch).launch(work, plan)
