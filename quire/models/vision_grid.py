"""Inputs of a vision tower that depend only on grids: attention ranges, interpolated positions, and rotations. A
token's `merge_size` x `merge_size` patches are neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.attention.interface import AttentionBatch
from quire.config.vision import VisionConfig

Grid = tuple[int, int, int]
"""Frames, rows and columns of an image's patches."""


@dataclass(frozen=True, slots=True)
class GridInputs:
    """Inputs of a vision tower for T patches. query_start: [frames + 1] int64, first patch of each frame. places: [T,
    4] int64, rows of the position table to blend; shares: [T, 4] float32, their weights. angles: [T, head_dim / 2]
    float32, radians of the rotation (empty for pooled towers). token_order: [tokens] int64, tokens in order of windows,
    None: no windows; window_start: [windows + 1] int64."""

    query_start: torch.Tensor
    places: torch.Tensor
    shares: torch.Tensor
    angles: torch.Tensor
    token_order: torch.Tensor | None = None
    window_start: torch.Tensor | None = None

    @property
    def attention_batches(self) -> list[AttentionBatch]:
        """Batches for frames and, if any, windows."""
        starts = (self.query_start, self.window_start)
        return [attention_batch(each) for each in starts if each is not None]


def attention_batch(query_start: torch.Tensor) -> AttentionBatch:
    """Batch whose sequences are frames or windows, without a KV pool. query_start: see GridInputs."""
    lengths = query_start.diff()
    sequences = torch.arange(len(lengths)).repeat_interleave(lengths)
    positions = torch.arange(int(query_start[-1])) - query_start[sequences]
    return AttentionBatch(query_start, torch.zeros_like(lengths), positions, sequences, (), ())


def grid_inputs(grids: Sequence[Grid], config: VisionConfig) -> GridInputs:
    """GridInputs of concatenated images. grids: patches per frame, row and column."""
    merge_size, half = config.merge_size, config.head_dim // 2
    parts = [_frame(rows, columns, merge_size, config.table_side) for _, rows, columns in grids]
    coordinates, places, shares = (
        torch.cat([part[which].repeat(grid[0], 1) for part, grid in zip(parts, grids, strict=True)])
        for which in range(3)
    )
    lengths = torch.tensor([rows * columns for frames, rows, columns in grids for _ in range(frames)])
    query_start = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    angles = torch.zeros(0)
    if not config.is_pooled:
        frequencies = 1.0 / (config.rope_theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half))
        angles = (coordinates[..., None].float() * frequencies).flatten(1)
    if not config.window:
        return GridInputs(query_start, places, shares, angles)
    order, window_start = _windows(grids, merge_size, config.window)
    return GridInputs(query_start, places, shares, reordered(angles, order, merge_size), order, window_start)


def reordered(rows: torch.Tensor, token_order: torch.Tensor, merge_size: int) -> torch.Tensor:
    """Permute patch rows [T, size] from token order to GridInputs' (windows')."""
    return rows.view(-1, merge_size**2, rows.shape[1])[token_order].view(rows.shape)


def _windows(grids: Sequence[Grid], merge: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    orders, lengths, first = [], [], 0
    for frames, rows, columns in grids:
        row, column = torch.meshgrid(torch.arange(rows // merge), torch.arange(columns // merge), indexing="ij")
        window = (row // side * (columns // merge) + column // side).flatten()
        order = window.argsort(stable=True)
        counts = window.bincount()
        for _ in range(frames):
            orders.append(first + order)
            lengths.append(counts[counts > 0] * merge**2)
            first += len(order)
    return torch.cat(orders), torch.cat((torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)))


def copied_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy of a host tensor on the device, which the host does not await."""
    return tensor if device.type == tensor.device.type else tensor.pin_memory().to(device, non_blocking=True)


def blended(table: torch.Tensor, places: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Learned positions of the patches, [T, size] float32. places, shares: see GridInputs. The four products are added
    in order."""
    total = table.new_zeros(0)
    for which in range(places.shape[1]):
        part = table[places[:, which]].float() * shares[:, which, None]
        total = part if which == 0 else total + part
    return total


def _frame(rows: int, columns: int, merge: int, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row and column ([T, 2] int64), `places` and `shares` of one frame's patches in token order."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    blocks = (rows // merge, merge, columns // merge, merge)
    row, column = (each.reshape(blocks).transpose(1, 2).flatten() for each in (row, column))
    low_row, high_row, row_share = _stretched(row, rows, side)
    low_column, high_column, column_share = _stretched(column, columns, side)
    places = torch.stack([y * side + x for y in (low_row, high_row) for x in (low_column, high_column)], dim=1)
    row_shares, column_shares = (torch.stack((1 - share, share), 1) for share in (row_share, column_share))
    shares = (row_shares[:, :, None] * column_shares[:, None, :]).flatten(1)
    return torch.stack((row, column), dim=1), places, shares


def _stretched(index: torch.Tensor, count: int, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions of a line of `count` on a line of `side`: the entries before and after, and the latter's share."""
    exact = index.float() * (side - 1) / max(count - 1, 1)
    before = exact.floor()
    low = before.long()
    return low, (low + 1).clamp(max=side - 1), exact - before
