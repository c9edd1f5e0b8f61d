"""What a device's runner keeps between steps."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.engine import EngineConfig
from quire.kv_cache.layout import KVCacheLayout
from quire.sampling.device.parameters import DeviceSamplingRows
from quire.worker.block_tables import BlockTables
from quire.worker.device.graph_dispatch import ExecutionSettings
from quire.worker.device.inputs import DeviceInputs
from quire.worker.device.request_state import DeviceRequestState
from quire.worker.device.state_arena import StateArena
from quire.worker.device.streams import DeviceStreams
from quire.worker.device.upload import Upload


@dataclass(frozen=True, slots=True)
class StepState:
    """All that is kept of live sequences, on the device and what the host knows of it, and the way from one to the
    other."""

    arena: StateArena
    requests: DeviceRequestState
    upload: Upload
    inputs: DeviceInputs
    streams: DeviceStreams


def make_state(
    config: EngineConfig, layout: KVCacheLayout, settings: ExecutionSettings, streams: DeviceStreams
) -> StepState:
    """Empty rows, and buffers for the largest step. Raises ConfigError when the rows cannot be addressed."""
    num_rows, max_model_len = config.scheduler.max_num_seqs, config.model.max_model_len
    block_size, num_groups = layout.block_size, len(layout.groups)
    arena = StateArena(num_rows, max_model_len, block_size, num_groups, DeviceSamplingRows.WIDTH, streams.device)
    tables = BlockTables([group.block_size for group in layout.groups], num_rows, max_model_len)
    sampling = DeviceSamplingRows(num_rows, arena.parameters, arena.parameters_offset)
    padded_seqs = max((num_rows, *settings.full_sizes))
    padded_tokens = max((config.scheduler.max_num_batched_tokens, padded_seqs, *settings.piecewise_sizes))
    return StepState(
        arena=arena,
        requests=DeviceRequestState(arena, tables, sampling),
        upload=Upload(streams, config.scheduler.queue_depth + 1),
        inputs=DeviceInputs(arena, block_size, padded_seqs, padded_tokens),
        streams=streams,
    )
