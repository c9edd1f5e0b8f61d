"""The processes of a fleet: what each is told."""

from __future__ import annotations

import os
from typing import Any

import pytest

from quire.config.options import EngineOptions
from quire.config.parallel import ReplicaSet
from quire.engine.messages import EngineReady
from quire.engine.open_fleet import open_fleet
from quire.errors import EngineDeadError
from quire.kv_cache.stats import EngineStats


class Recorded:
    """Stands for an engine process that is never ready."""

    def __init__(
        self,
        made: list[Recorded],
        options: EngineOptions,
        executor: str,
        name: str = "engine",
        replicas: ReplicaSet | None = None,
    ) -> None:
        self.options, self.executor, self.name, self.replicas = options, executor, name, replicas
        self.silence = 0.0
        self.stopped: int | None = None
        made.append(self)

    @property
    def ready(self) -> EngineReady:
        raise EngineDeadError("recorded only")

    def shutdown(self, timeout: float = 5.0) -> None: ...


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    made: list[Recorded] = []

    def make(options: EngineOptions, **more: Any) -> Recorded:
        return Recorded(made, options, **more)

    monkeypatch.setattr("quire.engine.open_fleet.ProcessClient", make)
    return made


def test_each_engine_is_told_its_blocks_its_share_and_its_log(made: list[Recorded]) -> None:
    options = EngineOptions(data_parallel_size=2, step_log="steps", swap_space="1GiB")
    fleet = open_fleet(options, "executor")
    ready = EngineReady(100, num_blocks=40, block_size=16, seconds={}, backend="")
    stats = EngineStats(num_host_blocks=3, block_bytes=10)
    first, second = (member.start for member in fleet.members)
    second(ready, None)
    first(ready, stats)
    second(ready, stats)
    options = [each.options for each in made]
    assert [each.name for each in made] == ["engine 0", "engine 1", "engine 0", "engine 1"]
    assert [each.step_log for each in options] == ["steps", "steps.replica1", "steps.1", "steps.replica1.1"]
    assert [each.num_blocks_override for each in options] == [None, 40, 40, 40]
    assert [each.swap_space for each in options] == ["1GiB", "1GiB", 60, 60], "of which each takes a half"
    fleet.shutdown()


def test_engines_that_share_experts_share_memory(made: list[Recorded]) -> None:
    """Those of one generation: after a death all get another one."""
    fleet = open_fleet(EngineOptions(data_parallel_size=2, enable_expert_parallel=True), "executor")
    ready = EngineReady(100, num_blocks=40, block_size=16, seconds={}, backend="")
    fleet.members[1].start(ready, None)
    first, second = (each.replicas for each in made)
    assert first is not None
    assert second is not None
    assert (first.number, second.number, first.count) == (0, 1, 2)
    assert (first.memory, first.bells) == (second.memory, second.bells)
    assert fleet._common is not None
    inode = os.stat(first.memory).st_ino
    fleet._common.renew()
    fleet.members[1].start(ready, None)
    assert made[2].replicas is not None
    assert os.stat(made[2].replicas.memory).st_ino != inode
    fleet.shutdown()
    assert not os.path.exists(first.memory)


def test_one_engine_has_no_number(made: list[Recorded]) -> None:
    open_fleet(EngineOptions(), "executor").shutdown()
    assert [(each.name, each.options) for each in made] == [("engine", EngineOptions())]


@pytest.mark.parametrize(("count", "asked", "restarts"), [(1, None, False), (2, None, True), (2, False, False)])
def test_several_are_started_again_unless_told_otherwise(
    made: list[Recorded], count: int, asked: bool | None, restarts: bool
) -> None:
    fleet = open_fleet(EngineOptions(data_parallel_size=count), "executor", restarts=asked)
    assert fleet._restarts == restarts
    fleet.shutdown()
