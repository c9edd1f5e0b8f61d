"""Back end of layers with recurrent states: finds their pages for a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.attention.device_batch import DeviceBatch, DeviceStateStep
from quire.attention.interface import AttentionBatch, StateStep
from quire.kv_cache.layout import KVCacheLayout


class StateBackend:
    """Plans each step's access to one pool's state groups. pages: by layer, [num_blocks, page bytes] uint8.
    batch_invariant: see DeviceStateStep."""

    def __init__(
        self, layout: KVCacheLayout, pages: Mapping[int, torch.Tensor], *, batch_invariant: bool = True
    ) -> None:
        self._batch_invariant = batch_invariant
        groups = layout.state_groups
        self._pages = pages
        self._group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        intervals = {group.block_size for group in groups}
        assert len(intervals) <= 1, "snapshots of all layers lie at the same tokens"
        self._interval = max(intervals, default=0)

    def plan(self, batch: AttentionBatch) -> StateStep | None:
        """Step's state tensors for layers; None if no layer has states."""
        if not self._pages:
            return None
        tables = {layer: batch.state_tables[group] for layer, group in self._group_of.items()}
        return StateStep(batch.query_start.tolist(), batch.start_positions, tables, self._interval, self._pages)

    def plan_on_device(self, batch: DeviceBatch) -> DeviceStateStep | None:
        """States of a device's step; None if no layer has states. Valid for graph replays: it queries and launches
        nothing."""
        if not self._pages:
            return None
        tables = {layer: batch.state_tables[group] for layer, group in self._group_of.items()}
        return DeviceStateStep(batch, tables, self._interval, self._pages, self._batch_invariant)
