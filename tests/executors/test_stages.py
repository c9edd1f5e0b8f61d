"""Two stages of a pipeline as processes: the bits of one rank, and several plans at a time."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from quire.clock import SystemClock
from quire.config.engine import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import Call
from quire.executors.local import LocalExecutor
from quire.executors.multiprocess import RankProcesses
from quire.executors.ranked import RankedExecutor
from tests.executors.test_multiprocess import configured, everything, pool, run
from tests.fakes.masks import AllowedByPosition
from tests.models.families import qwen3
from tests.models.harness import randomize, save
from tests.processes import has_ended


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(randomize(qwen3(num_hidden_layers=3)), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(autouse=True)
def runtime_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("QUIRE_RUNTIME_DIR", str(directory))
    return directory


def staged(config: EngineConfig) -> tuple[EngineCore, RankProcesses]:
    ranks = RankProcesses(config)
    executor = RankedExecutor(ranks, config.parallel.pp)
    return EngineCore(config, executor, SystemClock(), masks=AllowedByPosition()), ranks


def test_the_bits_of_one_rank(model_path: Path, runtime_directory: Path) -> None:
    config = configured(model_path)
    alone = EngineCore(config, LocalExecutor(config), SystemClock(), masks=AllowedByPosition())
    expected, vector, bits = run(alone), pool(alone, [7] * 31), everything(alone)
    alone.shutdown()
    core, ranks = staged(configured(model_path, pipeline_parallel_size=2))
    processes = [psutil.Process(pid) for pid in ranks.pids]
    try:
        assert run(core) == expected
        assert pool(core, [7] * 31) == vector
        assert everything(core) == bits
        stats = core.stats()
        assert stats.preemptions_total > 0
        assert stats.prefix_cache_hits_total > 0
        for method, argument in (("sleep", "1"), ("wake_up", ""), ("sleep", "2"), ("wake_up", "")):
            answer = core.handle(Call(1, method, argument))
            assert answer is not None
            assert answer.error is None
        assert run(core) == expected
        assert "on each of 2 ranks in 2 stages" in core.ready.backend
    finally:
        core.shutdown()
    assert all(has_ended(process) for process in processes)
    assert list(runtime_directory.iterdir()) == []


class Reused:
    """Ranks that outlive the engine cores over them."""

    def __init__(self, ranks: RankProcesses) -> None:
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def close(self) -> None:
        """The test closes them."""


