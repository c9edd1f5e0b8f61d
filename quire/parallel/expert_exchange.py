"""Experts that ranks of several replicas share, over memory that all have mapped."""

from __future__ import annotations

import mmap
from typing import Any

import torch

from quire import envs
from quire.config.model_shape import ModelShape
from quire.config.parallel import ParallelConfig, ReplicaSet
from quire.kernels.cpu import _native
from quire.kernels.cpu.recorder import Buffer, RecordedProgram, Recorder
from quire.kernels.cpu.runtime import NativeRuntime
from quire.parallel.interface import ExchangedLayer
from quire.parallel.replica_memory import map_shared
from quire.parallel.shared_memory import CROWDED_SPINS, SPINS
from quire.parallel.torch_dist import COLLECTIVE_TIMEOUT

MOST_RESULT_BYTES = 64 << 20
"""Bytes of results that a rank leaves for the others in a round."""
FEWEST_ROWS = 16

NOWHERE = 1
"""Area of rows that a step does not have."""


class SharedMemoryExchange:
    """Implements ExpertExchange."""

    def __init__(
        self,
        replicas: ReplicaSet,
        sizes: ParallelConfig,
        place: tuple[int, int],
        shape: ModelShape,
        max_rows: int,
        runtime: NativeRuntime,
    ) -> None:
        """place: number of the stage, and of the rank in it. max_rows: limit of a replica's step."""
        stage, rank = place
        self.size = replicas.count * sizes.tp
        self.rank = replicas.number * sizes.tp + rank
        width = shape.hidden
        top_k = max(layer.experts.num_active for layer in shape.layers if layer.experts is not None)
        most = MOST_RESULT_BYTES // (4 * replicas.count * top_k * width)
        layout = replicas.count, sizes.tp, min(max_rows, max(FEWEST_ROWS, most)), width, top_k
        page = mmap.ALLOCATIONGRANULARITY
        num_bytes = -(-_native.ExpertExchange.num_bytes(*layout) // page) * page
        # The tensor keeps the mapping.
        mapped = map_shared(replicas.memory, page + sizes.pp * num_bytes, page + stage * num_bytes, num_bytes)
        self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
        spins = SPINS if envs.affinity_cores() >= self.size * sizes.pp else CROWDED_SPINS
        seconds = COLLECTIVE_TIMEOUT.total_seconds()
        self.native: Any = _native.ExpertExchange(self._memory.data_ptr(), *layout, self.rank, spins, seconds)
        self._runtime = runtime
        self._layers: list[ExchangedLayer] = []
        self._idle_step: RecordedProgram | None = None

    def add_layer(self, layer: ExchangedLayer) -> None:
        self._layers.append(layer)

    def begin_step(self) -> None:
        self.native.open()

    def join_step(self) -> None:
        self.begin_step()
        if not self._layers:
            return  # a stage without experts
        if self._idle_step is None:
            self._idle_step = self._record()
        self._idle_step.run(0, externals=[torch.empty(0)])

    def release_workspaces(self) -> None:
        self._idle_step = None

    def _record(self) -> RecordedProgram:
        recorder = Recorder()
        for layer in self._layers:
            x, routing = (Buffer(recorder, width, NOWHERE, width) for width in (layer.size, 2 * layer.top_k))
            result = layer.record_experts(x, routing, x)
        return recorder.finish_program(result, self._runtime, 1)
