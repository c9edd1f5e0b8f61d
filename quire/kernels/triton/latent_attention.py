"""Latent attention: a token's heads read one vector per key. A program takes 64 rows (token x
head). Single tokens of long sequences are split into parts of SPLIT_KEYS."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.attention.device_batch import DeviceBatch
from quire.kernels.arguments import LatentShape
from quire.kernels.rotation import DeviceRotation
from quire.kernels.triton.attention_core import LOG2_E, merged, no_keys
from quire.kernels.triton.attention_tiles import DeviceLimits
from quire.kernels.triton.float8 import as_bits, from_cache, operand, to_cache
from quire.kernels.triton.paged_attention import BATCH_COLUMNS, find_sequence, sequence_and_keys
from quire.kernels.triton.runtime import bind, blocks_of, bound, dot, next_power_of_2

MOST_ROWS = 64
"""Rows of a tile, as many as the registers hold."""
SMALLEST_TILE = 16
"""Rows of the matrix units' smallest tile."""
SPLIT_KEYS = 1024
"""Keys of a part; a multiple of every tile."""
AHEAD = 8
"""Parts that the reduction loads ahead; they are merged in order."""
PROGRAMS_WANTED = 2
"""Programs per multiprocessor below which single tokens of long sequences are split."""


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """Tile sizes of latent attention. block_m: query rows; group: heads per tile, which holds block_m // group tokens.
    block_n: keys. is_fixed: the softmax always merges parts of SPLIT_KEYS keys."""

    block_m: int
    group: int
    block_n: int
    num_warps: int
    num_stages: int
    is_fixed: bool


def latent_tiles(shape: LatentShape, itemsize: int, limits: DeviceLimits, *, batch_invariant: bool) -> LatentTiles:
    """Tiles for prompts and single tokens. itemsize: bytes of a multiplied element."""
    width = next_power_of_2(shape.rank) + next_power_of_2(shape.rope_dim)
    is_small = batch_invariant or limits.shared_memory < 2 * MOST_ROWS * width * itemsize
    most_rows = MOST_ROWS // 2 if is_small else MOST_ROWS
    group = min(shape.num_heads, most_rows)
    block_m = max(SMALLEST_TILE, min(most_rows, next_power_of_2(group)))
    if itemsize == 4:  # matrix units round float32: products run in registers
        return LatentTiles(block_m, group, 16, 8, 1, batch_invariant)
    return LatentTiles(block_m, group, 32, 8, 1 if is_small else 2, batch_invariant)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _prepare_kernel(
    turned_query,
    latent,
    turned_key,
    pages,
    slots,
    cos,
    sin,
    page_stride,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    HALF: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    TOKEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Rotates, and writes latents. Program (token, HEADS of its heads; the last: the token's vector). Queries are
    rotated in place."""
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF_BLOCK)
    inside = half < HALF
    if TURNS:
        cosine = tl.load(cos + token * HALF + half, mask=inside, other=1.0)
        sine = tl.load(sin + token * HALF + half, mask=inside, other=0.0)
    part = tl.program_id(1)
    if part < tl.num_programs(1) - 1:
        if TURNS:
            head = part * HEADS + tl.arange(0, HEADS)
            at = turned_query + (token * NUM_HEADS + head)[:, None] * ROPE + half[None, :]
            mask = (head < NUM_HEADS)[:, None] & inside[None, :]
            first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
            # No thread stores before all have loaded.
            tl.debug_barrier()
            cosines = tl.broadcast_to(cosine[None, :], first.shape)
            sines = tl.broadcast_to(sine[None, :], first.shape)
            tl.store(at, tl.fma(first, cosines, -(second * sines)).to(turned_query.dtype.element_ty), mask=mask)
            tl.store(at + HALF, tl.fma(second, cosines, first * sines).to(turned_query.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + token)
        to = pages + slot // BLOCK_SIZE * page_stride + slot % BLOCK_SIZE * TOKEN
        dims = tl.arange(0, RANK_BLOCK)
        written = (dims < RANK) & (slot >= 0)
        values = tl.load(latent + token * RANK + dims, mask=written, other=0.0)
        tl.store(to + dims, to_cache(values, pages.dtype.element_ty), mask=written)
        turns = inside & (slot >= 0)
        low = tl.load(turned_key + token * ROPE + half, mask=turns, other=0.0).to(tl.float32)
        high = tl.load(turned_key + token * ROPE + HALF + half, mask=turns, other=0.0).to(tl.float32)
        if TURNS:
            turned = tl.fma(low, cosine, -(high * sine))
            high = tl.fma(high, cosine, low * sine)
            low = turned
        tl.store(to + RANK + half, to_cache(low, pages.dtype.element_ty), mask=turns)
        tl.store(to + RANK + HALF + half, to_cache(high, pages.dtype.element_ty), mask=turns)


@triton.jit
def _attend_part(
    queries,
    turned,
    positions,
    pages,
    page_stride,
    table,
    start,
    stop,
    scale,
    chosen,
    is_sparse,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    TOKEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SELECTS: tl.constexpr,
):
    """Softmax over the keys at [start, stop): maximum and sum of weights ([rows]), weighted values ([rows, DIM])."""
    maximum, total, values = no_keys(queries.shape[0], DIM)
    dims, turns = tl.arange(0, DIM), tl.arange(0, ROPE_BLOCK)
    for tile in range(bound(start), bound(stop), BLOCK_N):
        keys = tile + tl.arange(0, BLOCK_N)
        present = keys < stop
        if SELECTS:
            # Beyond the last chosen key, use a position that no row sees.
            keys = tl.where(is_sparse, tl.load(chosen + keys, mask=present & is_sparse, other=2147483647), keys)
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
        at = pages + blocks * page_stride + keys % BLOCK_SIZE * TOKEN
        latent = tl.load(at[:, None] + dims[None, :], mask=present[:, None] & (dims < RANK)[None, :], other=0.0)
        key_at = at[:, None] + RANK + turns[None, :]
        key = tl.load(key_at, mask=present[:, None] & (turns < ROPE)[None, :], other=0.0)
        latent = from_cache(latent, queries.dtype)
        key = from_cache(key, queries.dtype)
        scores = dot(queries, tl.trans(latent), tl.zeros((queries.shape[0], BLOCK_N), tl.float32))
        scores = dot(turned, tl.trans(key), scores)
        scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        weights = tl.exp2(tl.fma(scores, scale, -new_maximum[:, None]))
        factor = tl.exp2(maximum - new_maximum)
        maximum = new_maximum
        total = tl.fma(total, factor, tl.sum(weights, 1))
        values = dot(weights.to(queries.dtype), latent, values * factor[:, None])
    return maximum, total, values


@triton.jit
def _load_rows(query, at, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGES: tl.constexpr):
    dims = tl.arange(0, BLOCK)
    mask = inside[:, None] & (dims < WIDTH)[None, :]
    return operand(tl.load(query + at[:, None] * WIDTH + dims[None, :], mask=mask, other=0.0), PAGES)


@triton.jit(do_not_specialize=["num_seqs", "capacity"], do_not_specialize_on_alignment=BATCH_COLUMNS)
def _latent_kernel(
    query, turned_query, pages, out, part_values, part_maxima, part_totals, rows, query_start, seq_lens, tables,
    num_seqs, capacity, page_stride, table_stride, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, DIM: tl.constexpr,
    ROPE_BLOCK: tl.constexpr, TOKEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT_KEYS: tl.constexpr, IS_SPLIT: tl.constexpr, IS_FIXED: tl.constexpr,
):  # fmt: skip
    """Attends to all visible keys. Program (tile of tokens, GROUP heads, part); tiles with most keys come first.
    IS_SPLIT: parts go to [tokens, heads, capacity] of part_values etc.; else a program has all keys of its rows."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = find_sequence(query_start, tile, num_seqs, TOKENS)
    begin = tl.load(query_start + sequence)
    num_new = tl.load(query_start + sequence + 1) - begin
    first = (tile - begin // TOKENS - sequence) * TOKENS
    if first >= num_new:
        return
    num_tokens = tl.minimum(num_new - first, TOKENS)
    first_position = tl.load(seq_lens + sequence) - num_new + first
    end = first_position + num_tokens
    num_parts = tl.cdiv(end, SPLIT_KEYS)
    if tl.program_id(2) >= num_parts:
        return
    row = tl.arange(0, BLOCK_M)
    token, head = row // GROUP, tl.program_id(1) * GROUP + row % GROUP
    inside = (token < num_tokens) & (head < NUM_HEADS)
    positions = first_position + token
    at = (begin + first + token).to(tl.int64) * NUM_HEADS + head
    dims = tl.arange(0, DIM)
    mask = inside[:, None] & (dims < RANK)[None, :]
    queries = _load_rows(query, at, inside, RANK, DIM, pages.dtype.element_ty)
    turned = _load_rows(turned_query, at, inside, ROPE, ROPE_BLOCK, pages.dtype.element_ty)
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    if IS_SPLIT:
        for part in range(bound(tl.program_id(2)), bound(num_parts), bound(tl.num_programs(2))):
            maximum, total, values = _attend_part(
                queries, turned, positions, pages, page_stride, table, part * SPLIT_KEYS,
                tl.minimum(end, (part + 1) * SPLIT_KEYS), scale, table, False, RANK, ROPE, DIM, ROPE_BLOCK, TOKEN,
                BLOCK_SIZE, BLOCK_N, False,
            )  # fmt: skip
            to = at * capacity + part
            tl.store(part_maxima + to, maximum, mask=inside)
            tl.store(part_totals + to, total, mask=inside)
            tl.store(part_values + to[:, None] * RANK + dims[None, :], values, mask=mask)
    else:
        maximum, total, values = no_keys(BLOCK_M, DIM)
        for part in range(bound(num_parts)):
            part_maximum, part_total, part_value = _attend_part(
                queries, turned, positions, pages, page_stride, table, part * SPLIT_KEYS,
                tl.minimum(end, (part + 1) * SPLIT_KEYS), scale, table, False, RANK, ROPE, DIM, ROPE_BLOCK, TOKEN,
                BLOCK_SIZE, BLOCK_N, False,
            )  # fmt: skip
            maximum, total, values = merged(maximum, total, values, part_maximum, part_total, part_value)
        values = values / total[:, None]
        tl.store(out + at[:, None] * RANK + dims[None, :], values.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=BATCH_COLUMNS)
def _sparse_kernel(
    query, turned_query, pages, out, selected, rows, query_start, seq_lens, tables, num_seqs, page_stride, table_stride,
    scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, DIM: tl.constexpr,
    ROPE_BLOCK: tl.constexpr, TOKEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT_KEYS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Attends to chosen keys. Program (token, GROUP heads). A token that sees more than TOP keys reads those in its row
    of `selected`."""
    token = tl.program_id(0)
    if token >= tl.load(query_start + num_seqs):
        return
    sequence, seen = sequence_and_keys(query_start, seq_lens, token, num_seqs)
    row = tl.arange(0, BLOCK_M)
    head = tl.program_id(1) * GROUP + row
    inside = (row < GROUP) & (head < NUM_HEADS)
    at = token.to(tl.int64) * NUM_HEADS + head
    dims = tl.arange(0, DIM)
    mask = inside[:, None] & (dims < RANK)[None, :]
    queries = _load_rows(query, at, inside, RANK, DIM, pages.dtype.element_ty)
    turned = _load_rows(turned_query, at, inside, ROPE, ROPE_BLOCK, pages.dtype.element_ty)
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    chosen = selected + token.to(tl.int64) * TOP
    positions = tl.zeros_like(row) + seen - 1
    end = tl.minimum(seen, TOP)
    maximum, total, values = no_keys(BLOCK_M, DIM)
    for part in range(bound(tl.cdiv(end, SPLIT_KEYS))):
        part_maximum, part_total, part_value = _attend_part(
            queries, turned, positions, pages, page_stride, table, part * SPLIT_KEYS,
            tl.minimum(end, (part + 1) * SPLIT_KEYS), scale, chosen, seen > TOP, RANK, ROPE, DIM, ROPE_BLOCK, TOKEN,
            BLOCK_SIZE, BLOCK_N, True,
        )  # fmt: skip
        maximum, total, values = merged(maximum, total, values, part_maximum, part_total, part_value)
    values = values / total[:, None]
    tl.store(out + at[:, None] * RANK + dims[None, :], values.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["capacity"], do_not_specialize_on_alignment=["query_start", "seq_lens"])
def _merge_kernel(
    part_values,
    part_maxima,
    part_totals,
    out,
    query_start,
    seq_lens,
    capacity,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Program (head, sequence of one new token): merges its parts in order while loading the next."""
    sequence = tl.program_id(1)
    token = tl.load(query_start + sequence)
    if tl.load(query_start + sequence + 1) == token:
        return
    at = token.to(tl.int64) * NUM_HEADS + tl.program_id(0)
    one = tl.arange(0, 1)
    dims = tl.arange(0, DIM)[None, :]
    maximum, total, values = no_keys(1, DIM)
    num_parts = tl.cdiv(tl.load(seq_lens + sequence), SPLIT_KEYS)
    for part in tl.range(0, bound(num_parts), num_stages=AHEAD):
        place = at * capacity + part + one
        maximum, total, values = merged(
            maximum,
            total,
            values,
            tl.load(part_maxima + place),
            tl.load(part_totals + place),
            tl.load(part_values + place[:, None] * RANK + dims, mask=dims < RANK, other=0.0),
        )
    values = values / total[:, None]
    tl.store(out + at * RANK + dims, values.to(out.dtype.element_ty), mask=dims < RANK)


@dataclass(frozen=True, slots=True)
class LatentScratch:
    """Parts of single tokens of long sequences, float32: values [num_seqs * heads * capacity * rank] or more, maxima,
    totals. Layers use it in turn. capacity: parts per sequence."""

    values: torch.Tensor
    maxima: torch.Tensor
    totals: torch.Tensor
    capacity: int

    @classmethod
    def allocate(
        cls,
        num_heads: int,
        width: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        limits: DeviceLimits,
    ) -> LatentScratch:
        """Scratch for steps of up to `max_num_seqs` sequences of up to `max_model_len` tokens. width: at least the
        rank."""
        capacity = blocks_of(max_model_len, SPLIT_KEYS)
        cut = [count for count in range(1, max_num_seqs + 1) if is_cut(num_heads, count, max_model_len, limits)]
        rows = max(cut, default=0) * num_heads * capacity

        def empty(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        return cls(empty(rows * width), empty(rows), empty(rows), capacity)


def is_cut(num_heads: int, num_seqs: int, max_seq_len: int, limits: DeviceLimits) -> bool:
    """True if single tokens of `num_seqs` sequences are split, to fill the device."""
    tiles = num_seqs * blocks_of(num_heads, MOST_ROWS)
    return max_seq_len > SPLIT_KEYS and tiles < PROGRAMS_WANTED * limits.num_multiprocessors


class LatentKernels:
    """Kernels of one layer, bound to its pages ([num_blocks, block_size, rank + rope_dim + further elements])."""

    def __init__(
        self, shape: LatentShape, pages: torch.Tensor, tiles: LatentTiles, scratch: LatentScratch, limits: DeviceLimits
    ) -> None:
        self._shape, self._tiles, self._scratch, self._limits = shape, tiles, scratch, limits
        self._head_tiles = blocks_of(shape.num_heads, tiles.group)
        half = shape.rope_dim // 2
        self._heads = min(16, next_power_of_2(shape.num_heads))
        sizes = {"NUM_HEADS": shape.num_heads, "RANK": shape.rank, "SPLIT_KEYS": SPLIT_KEYS}
        dim = max(SMALLEST_TILE, next_power_of_2(shape.rank))
        parts = {"part_values": scratch.values, "part_maxima": scratch.maxima, "part_totals": scratch.totals}
        fixed = {"pages": pages, "page_stride": pages.stride(0)}
        self._prepare = {
            turns: bind(
                _prepare_kernel,
                {**fixed, "pages": as_bits(pages)},
                NUM_HEADS=shape.num_heads,
                RANK=shape.rank,
                ROPE=shape.rope_dim,
                TOKEN=pages.shape[2],
                HALF=half,
                RANK_BLOCK=next_power_of_2(shape.rank),
                HALF_BLOCK=next_power_of_2(half),
                HEADS=self._heads,
                BLOCK_SIZE=pages.shape[1],
                TURNS=turns,
                num_warps=4,
            )
            for turns in (False, True)
        }
        reading = {**fixed, "scale": shape.scale * LOG2_E.value}
        tiled = {
            **sizes,
            "GROUP": tiles.group,
            "ROPE": shape.rope_dim,
            "DIM": dim,
            "ROPE_BLOCK": max(SMALLEST_TILE, next_power_of_2(shape.rope_dim)),
            "TOKEN": pages.shape[2],
            "BLOCK_SIZE": pages.shape[1],
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }
        self._attend = {
            is_split: bind(_latent_kernel, {**reading, **parts}, IS_SPLIT=is_split, IS_FIXED=tiles.is_fixed, **tiled)
            for is_split in (False, True)
        }
        self._attend_selected = bind(_sparse_kernel, reading, TOP=shape.top, **tiled) if shape.top else None
        self._merge = bind(_merge_kernel, parts, **sizes, DIM=dim, AHEAD=AHEAD, num_warps=4)

    def launch(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: DeviceRotation | None,
        out: torch.Tensor,
        batch: DeviceBatch,
        group: int,
        selected: torch.Tensor | None = None,
    ) -> None:
        """Write and attend over latents (`AttentionStep.attend_latent`). Inputs are contiguous; queries rotate in
        place. out: [T, num_heads * rank], without padding rows. group: layer's KV group."""
        query, turned_query, latent, turned_key = inputs
        self.prepare(turned_query, latent, turned_key, rotation, batch, group)
        self.attend_written(query, turned_query, out, batch, group, selected)

    def prepare(
        self,
        turned_query: torch.Tensor,
        latent: torch.Tensor,
        turned_key: torch.Tensor,
        rotation: DeviceRotation | None,
        batch: DeviceBatch,
        group: int,
    ) -> None:
        """First half of `launch`: rotate, and write the latents."""
        slots = batch.slot_mapping[group]
        # Without rotation, any pointer serves as angles: the kernel does not read them.
        cos, sin = (slots, slots) if rotation is None else (rotation.cos, rotation.sin)
        grid = batch.num_tokens, blocks_of(self._shape.num_heads, self._heads) + 1
        self._prepare[rotation is not None](grid, turned_query, latent, turned_key, slots, cos, sin)

    def attend_written(
        self,
        query: torch.Tensor,
        turned_query: torch.Tensor,
        out: torch.Tensor,
        batch: DeviceBatch,
        group: int,
        selected: torch.Tensor | None = None,
    ) -> None:
        """Attend over latents that `launch` has written."""
        tables = batch.block_tables[group]
        if self._attend_selected is not None and selected is not None and batch.max_seq_len > self._shape.top:
            columns = batch.rows, batch.query_start, batch.seq_lens, tables, batch.num_seqs, tables.stride(0)
            grid = batch.num_tokens, self._head_tiles
            self._attend_selected(grid, query, turned_query, out, selected, *columns)
            return
        is_split = batch.max_query_len == 1 and is_cut(
            self._shape.num_heads, batch.num_seqs, batch.max_seq_len, self._limits
        )
        num_parts = blocks_of(batch.max_seq_len, SPLIT_KEYS) if is_split else 1
        tiles = batch.num_tokens // (self._tiles.block_m // self._tiles.group) + batch.num_seqs
        capacity = self._scratch.capacity
        self._attend[is_split](
            (tiles, self._head_tiles, num_parts),
            query,
            turned_query,
            out,
            batch.rows,
            batch.query_start,
            batch.seq_lens,
            tables,
            batch.num_seqs,
            capacity,
            tables.stride(0),
        )
        if is_split:
            grid = self._shape.num_heads, batch.num_seqs
            self._merge(grid, out, batch.query_start, batch.seq_lens, capacity)
