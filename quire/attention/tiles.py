"""Cutting a step's attention into work items of one shape: the plan of the plain torch back end.

A query tile is a few consecutive new tokens of one sequence; a key tile is KEY_TILE consecutive positions, starting
at a multiple of KEY_TILE. An item is one of each. Key tiles that no query of the tile may see are not listed.

What makes a query's result independent of everything around it: sums over keys happen inside a key tile, whose
borders are fixed, and partial results are merged in an order that depends on the tiles' numbers alone. Up to
WAVE_TILES of them (a wave, again with fixed borders) are merged pairwise as the leaves of a binary tree whose missing
leaves are left out; waves follow each other. An item that its query may not see contributes an exact zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.matmul import padded_rows

KEY_TILE = 64
WAVE_TILES = 16
SMALL_ROWS = 8
LARGE_ROWS = 128
SMALL_LIMIT = 64
"""Sequences with at most this many rows (new tokens x query heads per key head) take small tiles."""

Levels = tuple[tuple[torch.Tensor, torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Items that are computed together: whole waves of some query tiles, no query tile twice. I items."""

    tiles: torch.Tensor
    """[I] int64: the query tile of each item."""
    slots: torch.Tensor
    """[I, KEY_TILE] int64: the slot of each key (slots of block 0 for what lies outside the sequence)."""
    key_positions: torch.Tensor
    """[I, 1, 1, KEY_TILE] int32."""
    beyond: torch.Tensor
    """[B] int64: flat (item, key) indices of positions that the sequence has not reached."""
    levels: Levels
    """Merges, in order: items `right` are merged into items `left`."""
    roots: torch.Tensor
    """[R] int64: the items that hold the merged result of each query tile, afterwards."""
    root_tiles: torch.Tensor
    """[R] int64: those query tiles."""
    is_first: bool
    """None of the query tiles occurs in an earlier chunk."""


@dataclass(frozen=True, slots=True)
class TileList:
    """All work of the sequences that use one tile size. Q query tiles of `tile_tokens` tokens, `rows` rows each."""

    tile_tokens: int
    rows: int
    num_tiles: int
    gather: torch.Tensor
    """[Q * tile_tokens] int64: the batch's token in each place of the tiles (any token where there is none)."""
    places: torch.Tensor
    """[n] int64: places that hold a token ..."""
    tokens: torch.Tensor
    """[n] int64: ... and that token."""
    row_positions: torch.Tensor
    """[Q, 1, rows, 1] int32: position of each row's token; -1, which sees nothing, for rows without one."""
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Sequences:
    """A step's sequences as numpy columns: index of the first token in the batch, its position, number of tokens,
    and the block table [S, max_blocks]."""

    first_token: np.ndarray
    start: np.ndarray
    num_tokens: np.ndarray
    block_table: np.ndarray
    block_size: int

    def only(self, chosen: np.ndarray) -> Sequences:
        return Sequences(
            self.first_token[chosen],
            self.start[chosen],
            self.num_tokens[chosen],
            self.block_table[chosen],
            self.block_size,
        )


def plan_tiles(
    sequences: Sequences, *, heads_per_group: int, window: int | None, item_bytes: tuple[int, int], limit: int
) -> list[TileList]:
    """Cut a step into at most two lists: small tiles for sequences with few new tokens, large ones for the others.

    heads_per_group: query heads per key head. item_bytes: (fixed, per row) bytes that one item needs while it is
    computed; chunks are as long as `limit` bytes allow.
    """
    few = sequences.num_tokens * heads_per_group <= SMALL_LIMIT
    lists = []
    for chosen, target_rows in ((few, SMALL_ROWS), (~few, LARGE_ROWS)):
        if chosen.any():
            tile_tokens = max(1, target_rows // heads_per_group)
            rows = padded_rows(tile_tokens * heads_per_group)
            chunk_items = max(1, limit // (item_bytes[0] + rows * item_bytes[1]))
            lists.append(_plan_list(sequences.only(chosen), tile_tokens, heads_per_group, window, chunk_items))
    return lists


def _plan_list(
    sequences: Sequences, tile_tokens: int, heads_per_group: int, window: int | None, chunk_items: int
) -> TileList:
    tile_sequence, tile_rank = _ragged(-(-sequences.num_tokens // tile_tokens))
    offsets = (tile_rank * tile_tokens)[:, None] + np.arange(tile_tokens)
    present = offsets < sequences.num_tokens[tile_sequence][:, None]
    tokens = sequences.first_token[tile_sequence][:, None] + np.where(present, offsets, 0)
    positions = np.where(present, sequences.start[tile_sequence][:, None] + offsets, -1)
    rows = padded_rows(tile_tokens * heads_per_group)
    row_positions = np.full((len(tile_sequence), rows), -1, dtype=np.int32)
    row_positions[:, : tile_tokens * heads_per_group] = positions.repeat(heads_per_group, axis=1)
    places = np.flatnonzero(present)
    return TileList(
        tile_tokens=tile_tokens,
        rows=rows,
        num_tiles=len(tile_sequence),
        gather=torch.from_numpy(tokens.reshape(-1)),
        places=torch.from_numpy(places),
        tokens=torch.from_numpy(tokens.reshape(-1)[places]),
        row_positions=torch.from_numpy(row_positions)[:, None, :, None],
        chunks=_plan_chunks(sequences, tile_sequence, positions, window, chunk_items),
    )


def _plan_chunks(
    sequences: Sequences,
    tile_sequence: np.ndarray,
    positions: np.ndarray,
    window: int | None,
    chunk_items: int,
) -> tuple[Chunk, ...]:
    """positions: [Q, tile_tokens], -1 where there is no token (never in a tile's first place)."""
    first_key = np.zeros_like(tile_sequence)
    if window is not None:
        first_key = np.maximum(positions[:, 0] - window + 1, 0) // KEY_TILE
    item_tile, item_rank = _ragged(positions.max(axis=1) // KEY_TILE - first_key + 1)
    item_key = first_key[item_tile] + item_rank
    order = np.argsort(item_key // WAVE_TILES, kind="stable")
    item_tile, item_key = item_tile[order], item_key[order]
    wave = item_key // WAVE_TILES
    chunk = _chunk_numbers(wave, item_tile, chunk_items)
    starts = np.flatnonzero(np.diff(chunk, prepend=-1))
    chunks = []
    seen = np.zeros(len(tile_sequence), dtype=bool)
    for start, stop in zip(starts, [*starts[1:], len(chunk)], strict=True):
        tiles = item_tile[start:stop]
        chunks.append(_chunk(sequences, tile_sequence, tiles, item_key[start:stop], is_first=not seen[tiles].any()))
        seen[tiles] = True
    return tuple(chunks)


def _chunk_numbers(wave: np.ndarray, item_tile: np.ndarray, chunk_items: int) -> np.ndarray:
    """A chunk number for each item, rising: about `chunk_items` items each, one wave, waves of a tile uncut."""
    new_wave = np.diff(wave, prepend=-1) != 0
    new_group = new_wave | (np.diff(item_tile, prepend=-1) != 0)
    index = np.arange(len(wave))
    in_wave = index - np.maximum.accumulate(np.where(new_wave, index, 0))
    group_start = in_wave[np.maximum.accumulate(np.where(new_group, index, 0))]
    part = group_start // chunk_items
    return np.cumsum(new_wave | (np.diff(part, prepend=-1) != 0))


def _chunk(
    sequences: Sequences,
    tile_sequence: np.ndarray,
    tiles: np.ndarray,
    keys: np.ndarray,
    *,
    is_first: bool,
) -> Chunk:
    sequence = tile_sequence[tiles]
    positions = keys[:, None] * KEY_TILE + np.arange(KEY_TILE)
    logical = np.minimum(positions // sequences.block_size, sequences.block_table.shape[1] - 1)
    blocks = sequences.block_table[sequence[:, None], logical].astype(np.int64)
    lengths = sequences.start[sequence] + sequences.num_tokens[sequence]
    levels, roots = _merge_tree(tiles, keys)
    return Chunk(
        tiles=torch.from_numpy(tiles),
        slots=torch.from_numpy(blocks * sequences.block_size + positions % sequences.block_size),
        key_positions=torch.from_numpy(positions.astype(np.int32))[:, None, None],
        beyond=torch.from_numpy(np.flatnonzero(positions >= lengths[:, None])),
        levels=levels,
        roots=torch.from_numpy(roots),
        root_tiles=torch.from_numpy(tiles[roots]),
        is_first=is_first,
    )


def _merge_tree(tiles: np.ndarray, keys: np.ndarray) -> tuple[Levels, np.ndarray]:
    """Pairs to merge, level by level, until one item is left of each query tile; and those items. Two nodes are
    partners when their numbers differ in the last bit alone; a node without its partner moves up as it is."""
    node = np.arange(len(tiles))
    number = tiles.astype(np.int64) * WAVE_TILES + keys % WAVE_TILES
    levels = []
    for _ in range(WAVE_TILES.bit_length() - 1):
        number = number >> 1
        is_right = np.diff(number, prepend=-1) == 0
        right = np.flatnonzero(is_right)
        if right.size:
            levels.append((torch.from_numpy(node[right - 1]), torch.from_numpy(node[right])))
        node, number = node[~is_right], number[~is_right]
    return tuple(levels), node


def _ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts [3, 1]: ([0, 0, 0, 1], [0, 1, 2, 0])."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
