"""Division of a step's attention into work items of one shape, for the torch back end. A query tile is a few
consecutive new tokens of one sequence, a key tile KEY_TILE positions at a multiple of KEY_TILE, an item one of each.
Partial results merge by tile numbers, so a query's result does not depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.arguments import first_seen
from quire.kernels.matmul import padded_rows

KEY_TILE = 64
WAVE_TILES = 16
SMALL_ROWS = 8
LARGE_ROWS = 128
SMALL_LIMIT = 64
"""Maximum rows (new tokens x query heads per key head) of a sequence with small tiles."""

HIDDEN = -1e30
"""Term added to the score of an invisible key: finite, with weight exactly zero. A maximum at or below it means no
visible key."""

Levels = tuple[tuple[torch.Tensor, torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """I items computed together: whole waves of distinct query tiles."""

    tiles: torch.Tensor
    """[I] int64: query tile of each item."""
    key_rows: torch.Tensor
    """[I, 1, KEY_TILE] int64: page row of each key; one of block 0 beyond the sequence, so no query reads stale
    keys."""
    edges: torch.Tensor
    """[E] int64: items with keys that some of their queries do not see."""
    edge_bias: torch.Tensor
    """[E, 1, rows, KEY_TILE] float32, added to their scores: 0 for visible keys, at most HIDDEN for others."""
    levels: Levels
    """Merges of partial results, level by level in order: items `right` into items `left`."""
    roots: torch.Tensor
    """[R] int64: items with the merged result of each query tile."""
    root_tiles: torch.Tensor
    """[R] int64: query tile of each item that ends up with a whole result."""
    is_first: bool
    """True if no query tile is in an earlier chunk."""


@dataclass(frozen=True, slots=True)
class TileList:
    """Work of the sequences with one tile size: query tiles of `tile_tokens` tokens and `rows` rows."""

    tile_tokens: int
    rows: int
    num_tiles: int
    gather: torch.Tensor
    """[Q * tile_tokens] int64: token of each place (arbitrary for empty ones)."""
    places: torch.Tensor
    """[n] int64: indices of tile rows that hold a token; empty rows are left out."""
    tokens: torch.Tensor
    """[n] int64: token of the step in each of `places`."""
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Sequences:
    """Columns of a step's sequences: first token in the batch, its position, number of tokens, and block table [S,
    max_blocks]."""

    first_token: np.ndarray
    start: np.ndarray
    num_tokens: np.ndarray
    block_table: np.ndarray
    block_size: int
    last_seen: np.ndarray | None = None
    """[T]: last position that each token of the batch sees; None: its own."""

    def only(self, chosen: np.ndarray) -> Sequences:
        return Sequences(
            self.first_token[chosen],
            self.start[chosen],
            self.num_tokens[chosen],
            self.block_table[chosen],
            self.block_size,
            self.last_seen,
        )


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Query tiles while planned: sequence [Q], positions [Q, tile_tokens], row_positions [Q, rows], and the last
    positions that these see."""

    sequences: Sequences
    sequence: np.ndarray
    positions: np.ndarray
    row_positions: np.ndarray
    last_seen: np.ndarray
    rows_last_seen: np.ndarray


@dataclass(frozen=True, slots=True)
class Window:
    """Visible earlier positions; see `window` and `is_chunked` of LayerAttention."""

    size: int | None = None
    is_chunked: bool = False

    def first(self, positions: np.ndarray) -> np.ndarray:
        """First position (possibly < 0) that tokens at these positions see."""
        assert self.size is not None, "a window of all positions has no first one"
        return first_seen(positions, self.size, is_chunked=self.is_chunked)


def plan_tiles(
    sequences: Sequences, *, heads_per_group: int, window: Window, item_bytes: tuple[int, int], limit: int
) -> list[TileList]:
    """Divide a step into at most two lists: small tiles for sequences with few new tokens, large for others.
    heads_per_group: query heads per key head. item_bytes: (fixed, per row) bytes of an item's computation; chunks use
    up to `limit`."""
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
    sequences: Sequences, tile_tokens: int, heads_per_group: int, window: Window, chunk_items: int
) -> TileList:
    tile_sequence, tile_rank = ragged(-(-sequences.num_tokens // tile_tokens))
    offsets = (tile_rank * tile_tokens)[:, None] + np.arange(tile_tokens)
    present = offsets < sequences.num_tokens[tile_sequence][:, None]
    tokens = sequences.first_token[tile_sequence][:, None] + np.where(present, offsets, 0)
    # A place without a token repeats the tile's first position: whatever it attends to is dropped.
    positions = sequences.start[tile_sequence][:, None] + np.where(present, offsets, offsets[:, :1])
    last_seen = positions
    if sequences.last_seen is not None:
        last_seen = np.where(present, sequences.last_seen[tokens], sequences.last_seen[tokens[:, :1]])
    rows = padded_rows(tile_tokens * heads_per_group)

    def of_rows(of_tokens: np.ndarray) -> np.ndarray:
        found = np.zeros((len(tile_sequence), rows), dtype=np.int64)
        found[:, : tile_tokens * heads_per_group] = of_tokens.repeat(heads_per_group, axis=1)
        return found

    row_positions = of_rows(positions)
    rows_last_seen = row_positions if last_seen is positions else of_rows(last_seen)
    queries = QueryTiles(sequences, tile_sequence, positions, row_positions, last_seen, rows_last_seen)
    places = np.flatnonzero(present)
    return TileList(
        tile_tokens=tile_tokens,
        rows=rows,
        num_tiles=len(tile_sequence),
        gather=torch.from_numpy(tokens.reshape(-1)),
        places=torch.from_numpy(places),
        tokens=torch.from_numpy(tokens.reshape(-1)[places]),
        chunks=_plan_chunks(queries, window, chunk_items),
    )


def _plan_chunks(queries: QueryTiles, window: Window, chunk_items: int) -> tuple[Chunk, ...]:
    first_key = np.zeros_like(queries.sequence)
    if window.size is not None:
        first_key = np.maximum(window.first(queries.positions[:, 0]), 0) // KEY_TILE
    item_tile, item_rank = ragged(queries.last_seen.max(axis=1) // KEY_TILE - first_key + 1)
    item_key = first_key[item_tile] + item_rank
    order = np.argsort(item_key // WAVE_TILES, kind="stable")
    item_tile, item_key = item_tile[order], item_key[order]
    wave = item_key // WAVE_TILES
    chunk = _chunk_numbers(wave, item_tile, chunk_items)
    starts = np.flatnonzero(np.diff(chunk, prepend=-1))
    chunks = []
    seen = np.zeros(len(queries.sequence), dtype=bool)
    for start, stop in zip(starts, [*starts[1:], len(chunk)], strict=True):
        tiles = item_tile[start:stop]
        chunks.append(_chunk(queries, tiles, item_key[start:stop], window, is_first=not seen[tiles].any()))
        seen[tiles] = True
    return tuple(chunks)


def _chunk_numbers(wave: np.ndarray, item_tile: np.ndarray, chunk_items: int) -> np.ndarray:
    new_wave = np.diff(wave, prepend=-1) != 0
    new_group = new_wave | (np.diff(item_tile, prepend=-1) != 0)
    index = np.arange(len(wave))
    in_wave = index - np.maximum.accumulate(np.where(new_wave, index, 0))
    group_start = in_wave[np.maximum.accumulate(np.where(new_group, index, 0))]
    part = group_start // chunk_items
    return np.cumsum(new_wave | (np.diff(part, prepend=-1) != 0))


def _chunk(queries: QueryTiles, tiles: np.ndarray, keys: np.ndarray, window: Window, *, is_first: bool) -> Chunk:
    sequences, sequence = queries.sequences, queries.sequence[tiles]
    block_size = sequences.block_size
    positions = keys[:, None] * KEY_TILE + np.arange(KEY_TILE)
    logical = np.minimum(positions // block_size, sequences.block_table.shape[1] - 1)
    blocks = sequences.block_table[sequence[:, None], logical].astype(np.int64)
    lengths = sequences.start[sequence] + sequences.num_tokens[sequence]
    rows = np.where(positions < lengths[:, None], blocks * 2 * block_size + positions % block_size, 0)
    is_edge = queries.last_seen[tiles].min(axis=1) < positions[:, -1]
    if window.size is not None:
        is_edge |= window.first(queries.positions[tiles].max(axis=1)) > positions[:, 0]
    edges = np.flatnonzero(is_edge)
    levels, roots = _merge_tree(tiles, keys)
    return Chunk(
        tiles=torch.from_numpy(tiles),
        key_rows=torch.from_numpy(rows)[:, None],
        edges=torch.from_numpy(edges),
        edge_bias=_bias(
            queries.row_positions[tiles[edges]], queries.rows_last_seen[tiles[edges]], positions[edges], window
        ),
        levels=levels,
        roots=torch.from_numpy(roots),
        root_tiles=torch.from_numpy(tiles[roots]),
        is_first=is_first,
    )


def _bias(own: np.ndarray, last_seen: np.ndarray, keys: np.ndarray, window: Window) -> torch.Tensor:
    """Score bias that hides unseen keys, [E, 1, rows, KEY_TILE]. own, last_seen: [E, rows] positions; keys: [E,
    KEY_TILE] positions."""
    wide_keys = torch.from_numpy(keys.astype(np.float32))[:, None]
    distance = torch.from_numpy(last_seen.astype(np.float32))[:, :, None] - wide_keys
    bias = distance.clamp(max=0.0)
    if window.size is not None:
        first = torch.from_numpy(window.first(own).astype(np.float32))[:, :, None]
        bias = torch.minimum(bias, (wide_keys - first).clamp_(max=0.0))
    return bias.mul_(-HIDDEN)[:, None]


def _merge_tree(tiles: np.ndarray, keys: np.ndarray) -> tuple[Levels, np.ndarray]:
    """Pairs to merge, level by level, until one item per query tile is left; then these items."""
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


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Owner of each item (a sequence, a tile) and its index with that owner: counts [3, 1] -> ([0, 0, 0, 1], [0, 1, 2,
    0])."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
