"""The processes of a fleet: what each is told."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.options import EngineOptions
from quire.engine.messages import EngineReady
from quire.engine.open_fleet import open_fleet
from quire.errors import EngineDeadError
from quire.kv_cache.stats import EngineStats


class Recorded:
    """Stands for an engine process that is never ready."""

    def __init__(self, made: list[Recorded], options: EngineOptions, executor: str, name: str = "engine") -> None:
        self.options, self.executor, self.name = options, executor, name
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
