"""A device worker with CUDA graphs on a host: the real kernels in Triton's interpreter, captured by a recording."""

from __future__ import annotations

from dataclasses import replace

from quire.config.engine import EngineConfig
from quire.executors.device import DeviceExecutor
from quire.worker.platform.cuda import DeviceWorker
from quire.worker.platform.graph_capture import GraphCapture
from tests.fakes.graph_capture import RecordingCapture

SIZES = (2, 8)


class GraphWorker(DeviceWorker):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.captures: list[RecordingCapture] = []

    def _make_capture(self) -> GraphCapture:
        self.captures.append(RecordingCapture())
        return self.captures[-1]


class GraphExecutor(DeviceExecutor):
    """With graphs of SIZES, though the device is the host."""

    def __init__(self, config: EngineConfig) -> None:
        device = replace(config.device, cuda_graphs="full_and_piecewise", cuda_graph_sizes=SIZES)
        self._worker: GraphWorker | None = GraphWorker(replace(config, device=device))

    @property
    def worker(self) -> GraphWorker:
        assert self._worker is not None
        return self._worker
