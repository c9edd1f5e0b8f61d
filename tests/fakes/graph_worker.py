"""An executor with CUDA graphs on a host: the real kernels in Triton's interpreter, captured by a recording."""

from __future__ import annotations

from dataclasses import replace

from quire.config.engine import EngineConfig
from quire.executors.local import LocalExecutor
from quire.worker.platform.cuda import CudaPlatform
from quire.worker.platform.graph_capture import GraphCapture
from tests.fakes.graph_capture import RecordingCapture

SIZES = (2, 8)


class GraphPlatform(CudaPlatform):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.captures: list[RecordingCapture] = []

    def make_capture(self) -> GraphCapture:
        self.captures.append(RecordingCapture())
        return self.captures[-1]


class GraphExecutor(LocalExecutor):
    """With graphs of SIZES, though the device is the host."""

    def __init__(self, config: EngineConfig) -> None:
        device = replace(config.device, cuda_graphs="full_and_piecewise", cuda_graph_sizes=SIZES)
        config = replace(config, device=device)
        self.platform = GraphPlatform(config)
        super().__init__(config, self.platform)
