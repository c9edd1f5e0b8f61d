"""Collectives over NCCL, on a card and inside its graphs. NCCL refuses two ranks on one card, so the group has one
rank; for a model that is shared out, the other rank's part of every collective is a copy of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from quire.clock import SystemClock
from quire.engine.core import EngineCore
from quire.executors.local import LocalExecutor
from quire.kernels.triton.norm import sum_parts
from quire.worker.platform.cuda import CudaPlatform
from quire.worker.platform.graph_capture import CudaGraphCapture, capturing
from tests.executors.test_multiprocess import configured, everything
from tests.fakes.masks import AllowedByPosition
from tests.models.conftest import SavedModel

pytestmark = pytest.mark.gpu(interpretable=False)


class OwnPartTwice:
    """Implements ProcessGroup: rank 0 of 2. num_calls: collectives that the host has asked NCCL for."""

    native = None
    rank = 0
    size = 2

    def __init__(self, meeting_point: Path) -> None:
        from quire.parallel.nccl import NcclGroup

        self.alone = NcclGroup(meeting_point, 0, 1)
        self.num_calls = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return sum_parts(torch.stack(self._parts(tensor)))

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._parts(tensor), dim=dim)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return self.alone.broadcast(tensor, 0)

    def barrier(self) -> None:
        self.alone.barrier()

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.num_calls += 1
        own = self.alone.all_gather(tensor, dim=0)
        return [own, own]


@pytest.fixture
def on_a_stream() -> Iterator[None]:
    """Captures need another stream than the default one."""
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        yield


@pytest.mark.usefixtures("on_a_stream")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_replays_collectives(tmp_path: Path, dtype: torch.dtype) -> None:
    """Each replay sends what lies in the input then."""
    group = OwnPartTwice(tmp_path / "ranks").alone
    x = torch.zeros(33, 1024, dtype=dtype, device="cuda")
    capture = CudaGraphCapture()
    with capturing(capture):
        capture.begin_capture()
        total, gathered, sent = (
            group.all_reduce(x + 1),
            group.all_gather(x + 2, dim=1),
            group.broadcast(x + 3, source=0),
        )
        graph = capture.end_capture()
    for seed in range(3):
        values = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)
        x.copy_(values)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(total, values + 1)
        assert torch.equal(gathered, values + 2)
        assert torch.equal(sent, values + 3)


def test_a_shared_out_model_in_graphs(tmp_path: Path, saved_model: Callable[[str], SavedModel]) -> None:
    """Bits of tokens and log-probabilities are those without graphs, and decodes ask the host for no collective."""
    found, calls = [], []
    for number, graphs in enumerate(("none", "full", "full_and_piecewise")):
        options = {"device": "cuda", "cuda_graphs": graphs, "dtype": "float32", "num_blocks_override": 300}
        config = configured(saved_model("qwen3").directory, attention_backend="auto", batch_invariant=True, **options)
        group = OwnPartTwice(tmp_path / f"ranks{number}")
        executor = LocalExecutor(config, CudaPlatform(config, group))
        core = EngineCore(config, executor, SystemClock(), masks=AllowedByPosition())
        before = group.num_calls
        found.append(everything(core))
        calls.append(group.num_calls - before)
        core.shutdown()
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert calls[2] <= calls[1] < calls[0]
