"""Low-rank adapters: y[t] += scale * (x[t] A^T) B^T with A and B of row t's slot. The device sorts rows by
slot, in tiles of one slot each. A row's bits do not depend on batch or slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import blocks_of, bound, dot, launch, narrow, next_power_of_2

ROWS = 16
"""Rows of a tile: the tensor cores' least."""
COLUMNS = 64
"""Columns of y per program of the second product."""
MOST_RANKS = 64
"""Maximum rows of A that one program computes."""
SPLIT = 512
"""Inputs from which on another program shares the first product; the second adds their sums."""
MOST_SPLITS = 4


@dataclass(frozen=True, slots=True)
class AdapterMatrices:
    """Adapters of one layer by slot, the first of slot 1. A piece is the columns of y that share one A. a: [slots,
    pieces, max_rank, inputs]. b: [slots, max_rank * columns], by piece [max_rank, columns of the piece]. ranks, scales:
    [slots, pieces] int32 and float32; rank 0: no adapter. places: [pieces, 3] int32, a piece's first column of y,
    number of columns, and start in b. blocks: [N, 2] int32, piece of each COLUMNS columns, and block in it."""

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor
    places: torch.Tensor
    blocks: torch.Tensor

    @classmethod
    def empty(
        cls,
        num_slots: int,
        max_rank: int,
        inputs: int,
        pieces: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> AdapterMatrices:
        """Room for all slots' adapters, allocated at load. pieces: first column and number of columns of each."""
        widths, count = [width for _, width in pieces], len(pieces)
        starts = [max_rank * start for start in accumulate(widths, initial=0)]
        places = [(*piece, start) for piece, start in zip(pieces, starts, strict=False)]
        blocks = [(piece, number) for piece, width in enumerate(widths) for number in range(blocks_of(width, COLUMNS))]
        return cls(
            torch.empty(num_slots, count, max_rank, inputs, dtype=dtype, device=device),
            torch.empty(num_slots, starts[-1], dtype=dtype, device=device),
            torch.zeros(num_slots, count, dtype=torch.int32, device=device),
            torch.zeros(num_slots, count, dtype=torch.float32, device=device),
            torch.tensor(places, dtype=torch.int32).to(device),
            torch.tensor(blocks, dtype=torch.int32).to(device),
        )

    def store(self, slot: int, piece: int, start: int, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """Copy an adapter's matrices for a piece from the host. start: as in `places`. a: [rank, inputs]; b: [rank,
        columns]; contiguous, of the stored dtype."""
        rank = len(a)
        self.a[slot - 1, piece, :rank].copy_(a)
        self.b[slot - 1, start : start + b.numel()].copy_(b.flatten())
        self.scales[slot - 1, piece] = scale
        self.ranks[slot - 1, piece] = rank

    def clear(self, slot: int, count: int = 1) -> None:
        self.ranks[slot - 1 : slot - 1 + count].zero_()


@dataclass(frozen=True, slots=True)
class SlotTiles:
    """Rows of a step grouped by adapter slot. rows: [T] int32, row numbers sorted by slot. tiles: [M, 3] int32: slot
    (0: unused), first place in `rows`, end of the slot's."""

    rows: torch.Tensor
    tiles: torch.Tensor

    @classmethod
    def of(cls, slots: torch.Tensor, num_slots: int) -> SlotTiles:
        """Sort the rows by their slot. slots: [T] int64."""
        ordered, rows = slots.sort(stable=True)
        starts = torch.searchsorted(ordered, torch.arange(1, num_slots + 2, device=slots.device))
        tile_ends = ((starts.diff() + ROWS - 1) // ROWS).cumsum(0)
        num_tiles = len(rows) // ROWS + min(num_slots, len(rows))
        tile = torch.arange(num_tiles, device=slots.device)
        found = torch.searchsorted(tile_ends, tile, right=True)
        known = found.clamp(max=num_slots - 1)
        within = tile - torch.where(known > 0, tile_ends[known - 1], 0)
        of_tiles = torch.where(found < num_slots, known + 1, 0), starts[known] + within * ROWS, starts[known + 1]
        return cls(rows.int(), torch.stack(of_tiles).t().int().contiguous())


@triton.jit
def _tile(rows, tiles, ROWS: tl.constexpr):
    """Rows of this program's tile, [ROWS] int64, and which of them are its own."""
    at = tiles + 3 * tl.program_id(0)
    places = tl.load(at + 1) + tl.arange(0, ROWS)
    end = tl.load(at + 2)
    # Places beyond the end repeat the last: nothing out of range is read, and they are not stored.
    return tl.load(rows + tl.minimum(places, end - 1)).to(tl.int64), places < end


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x,
    a,
    ranks,
    scales,
    factors,
    out,
    rows,
    tiles,
    num_rows,
    x_stride,
    K: tl.constexpr,
    REPEATS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    PIECES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile, rows of A of a piece, split of K): out[split, row, piece * MAX_RANK + r] = factors x A^T."""
    BLOCKS: tl.constexpr = (MAX_RANK + BLOCK_R - 1) // BLOCK_R
    LENGTH: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
    SAME: tl.constexpr = x.dtype.element_ty == a.dtype.element_ty
    DTYPE: tl.constexpr = x.dtype.element_ty if SAME else tl.float32
    slot = tl.load(tiles + 3 * tl.program_id(0)).to(tl.int64) - 1
    if slot >= 0:
        piece = tl.program_id(1) // BLOCKS
        first = tl.program_id(1) % BLOCKS * BLOCK_R
        rank = tl.load(ranks + slot * PIECES + piece)
        if first < rank:
            row, inside = _tile(rows, tiles, ROWS)
            r = first + tl.arange(0, BLOCK_R)
            from_a = a + ((slot * PIECES + piece) * MAX_RANK + tl.minimum(r, rank - 1)) * K
            total = tl.zeros((ROWS, BLOCK_R), tl.float32)
            begin = tl.program_id(2) * LENGTH
            for start in range(bound(begin), bound(tl.minimum(begin + LENGTH, K)), BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                present = k < K
                from_x = x + (row // REPEATS)[:, None] * x_stride + k[None, :]
                part = tl.load(from_x, mask=present[None, :], other=0.0)
                weight = tl.load(from_a[None, :] + k[:, None], mask=present[:, None], other=0.0)
                total = dot(part.to(DTYPE), weight.to(DTYPE), total)
            total *= tl.load(scales + slot * PIECES + piece)
            if HAS_FACTORS:
                total *= tl.load(factors + row)[:, None]
            to = out + (tl.program_id(2).to(tl.int64) * num_rows + row) * (PIECES * MAX_RANK) + piece * MAX_RANK
            tl.store(to[:, None] + r[None, :], total, mask=inside[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    inner,
    b,
    ranks,
    y,
    blocks,
    places,
    rows,
    tiles,
    num_rows,
    y_stride,
    slot_stride,
    PIECES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Program (tile, columns of a piece): y += (sum of the splits of inner) B^T."""
    SAME: tl.constexpr = y.dtype.element_ty == b.dtype.element_ty
    DTYPE: tl.constexpr = y.dtype.element_ty if SAME else tl.float32
    slot = tl.load(tiles + 3 * tl.program_id(0)).to(tl.int64) - 1
    if slot >= 0:
        piece = tl.load(blocks + 2 * tl.program_id(1))
        rank = tl.load(ranks + slot * PIECES + piece)
        if rank > 0:
            row, inside = _tile(rows, tiles, ROWS)
            column = tl.load(blocks + 2 * tl.program_id(1) + 1) * COLUMNS + tl.arange(0, COLUMNS)
            width = tl.load(places + 3 * piece + 1)
            from_b = b + slot * slot_stride + tl.load(places + 3 * piece + 2) + column
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in range(0, bound(rank), BLOCK_R):
                r = start + tl.arange(0, BLOCK_R)
                part = tl.zeros((ROWS, BLOCK_R), tl.float32)
                for split in tl.static_range(SPLITS):
                    from_row = inner + (row + split * num_rows) * (PIECES * MAX_RANK) + piece * MAX_RANK
                    part += tl.load(from_row[:, None] + r[None, :], mask=(r < rank)[None, :], other=0.0)
                present = (r < rank)[:, None] & (column < width)[None, :]
                weight = tl.load(from_b[None, :] + r[:, None].to(tl.int64) * width, mask=present, other=0.0)
                total = dot(narrow(part, DTYPE), weight.to(DTYPE), total)
            to = y + row[:, None] * y_stride + tl.load(places + 3 * piece) + column[None, :]
            mask = inside[:, None] & (column < width)[None, :]
            total += tl.load(to, mask=mask, other=0.0).to(tl.float32)
            tl.store(to, narrow(total, y.dtype.element_ty), mask=mask)


@triton.jit
def _look_up_kernel(
    indices,
    a,
    ranks,
    scales,
    out,
    rows,
    tiles,
    K: tl.constexpr,
    MAX_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Program (tile, rows of A): out[row, r] = scale * A[r, index of the row]."""
    slot = tl.load(tiles + 3 * tl.program_id(0)).to(tl.int64) - 1
    if slot >= 0:
        rank = tl.load(ranks + slot)
        r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        row, inside = _tile(rows, tiles, ROWS)
        mask = inside[:, None] & (r < rank)[None, :]
        at = a + (slot * MAX_RANK + r)[None, :] * K + tl.load(indices + row)[:, None]
        total = tl.load(at, mask=mask, other=0.0).to(tl.float32) * tl.load(scales + slot)
        tl.store(out + row[:, None] * MAX_RANK + r[None, :], total, mask=mask)


def add_adapted(
    matrices: AdapterMatrices,
    x: torch.Tensor,
    y: torch.Tensor,
    order: SlotTiles,
    factors: torch.Tensor | None = None,
    repeats: int = 1,
) -> None:
    """Add the adapters' results to y. x: [T / repeats, inputs], y: [T, columns], rows may be strided; any float
    dtypes. order: y's. factors: [T] float32."""
    (num_rows, _), inputs = y.shape, x.shape[1]
    if num_rows == 0:
        return
    assert x.stride(1) == 1, "the elements of a row lie side by side"
    _, pieces, max_rank, _ = matrices.a.shape
    splits = max(1, min(MOST_SPLITS, inputs // SPLIT))
    block_r = min(MOST_RANKS, max(16, next_power_of_2(max_rank)))
    inner = torch.empty(splits, num_rows, pieces * max_rank, dtype=torch.float32, device=x.device)
    launch(
        _shrink_kernel,
        (len(order.tiles), pieces * blocks_of(max_rank, block_r), splits),
        x,
        matrices.a,
        matrices.ranks,
        matrices.scales,
        factors,
        inner,
        order.rows,
        order.tiles,
        num_rows,
        x.stride(0),
        K=inputs,
        REPEATS=repeats,
        HAS_FACTORS=factors is not None,
        PIECES=pieces,
        MAX_RANK=max_rank,
        SPLITS=splits,
        ROWS=ROWS,
        BLOCK_R=block_r,
        BLOCK_K=128 if x.dtype == matrices.a.dtype != torch.float32 else 64,
        num_warps=4,
        num_stages=3,
    )
    _expand(matrices, inner, y, order)


def add_looked_up(matrices: AdapterMatrices, indices: torch.Tensor, y: torch.Tensor, order: SlotTiles) -> None:
    """Add to y, [T, columns], from a table. indices: [T] int64, of inputs; matrices: one piece."""
    if len(y) == 0:
        return
    _, pieces, max_rank, num_indices = matrices.a.shape
    assert pieces == 1, "a table has one matrix"
    block_r = min(MOST_RANKS, next_power_of_2(max_rank))
    inner = torch.empty(1, len(y), max_rank, dtype=torch.float32, device=y.device)
    launch(
        _look_up_kernel,
        (len(order.tiles), blocks_of(max_rank, block_r)),
        indices,
        matrices.a,
        matrices.ranks,
        matrices.scales,
        inner,
        order.rows,
        order.tiles,
        K=num_indices,
        MAX_RANK=max_rank,
        ROWS=ROWS,
        BLOCK_R=block_r,
        num_warps=4,
    )
    _expand(matrices, inner, y, order)


def _expand(matrices: AdapterMatrices, inner: torch.Tensor, y: torch.Tensor, order: SlotTiles) -> None:
    _, pieces, max_rank, _ = matrices.a.shape
    assert y.stride(1) == 1, "the elements of a row lie side by side"
    launch(
        _expand_kernel,
        (len(order.tiles), len(matrices.blocks)),
        inner,
        matrices.b,
        matrices.ranks,
        y,
        matrices.blocks,
        matrices.places,
        order.rows,
        order.tiles,
        len(y),
        y.stride(0),
        matrices.b.shape[1],
        PIECES=pieces,
        MAX_RANK=max_rank,
        SPLITS=len(inner),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        BLOCK_R=min(MOST_RANKS, max(16, next_power_of_2(max_rank))),
        num_warps=4,
        num_stages=2,
    )
