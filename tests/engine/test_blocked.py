"""While all requests wait for something outside the engine, the driver of a core sleeps between two looks at it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from quire.config.options import EngineOptions
from quire.engine.core import BLOCKED_SECONDS, EngineCore
from quire.engine.inprocess_client import InProcessClient
from quire.engine.messages import Abort, EngineOutputs
from quire.engine.process import StopFlag, serve
from quire.kv_cache.stats import EngineStats
from quire.utils.heartbeat import Progress
from tests.engine.driving import add, first_update


class BlockedCore:
    """Has a request that waits for `num_looks` steps, and computes it in the one after."""

    output_window = 0.0

    def __init__(self, num_looks: int) -> None:
        self.num_looks = num_looks
        self.num_steps = 0
        self.is_blocked = False
        self.num_checks = 0

    @property
    def has_work(self) -> bool:
        return self.num_steps <= self.num_looks

    def step(self) -> EngineOutputs:
        self.num_steps += 1
        self.is_blocked = self.num_steps <= self.num_looks
        return EngineOutputs()

    def stats(self) -> EngineStats:
        return EngineStats()

    def check_when_idle(self) -> None:
        assert not self.has_work
        self.num_checks += 1

    def idle(self) -> bool:
        return False


class SilentChannel:
    """No message comes. waits: what the loop slept for; the last of them asks the loop to stop."""

    def __init__(self, stop: StopFlag) -> None:
        self._stop = stop
        self.waits: list[float] = []

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self._stop.is_set = seconds != BLOCKED_SECONDS

    def has_arrival(self) -> bool:
        return False

    def read(self) -> list[Any]:
        return []

    def send(self, _message: Any) -> None:
        """The parent does not listen."""


def test_the_engine_process_sleeps_until_a_message_or_for_a_moment() -> None:
    stop = StopFlag()
    core, channel = BlockedCore(num_looks=3), SilentChannel(stop)
    serve(core, channel, stop, Progress())  # type: ignore[arg-type]
    assert channel.waits == [BLOCKED_SECONDS] * 3 + [1.0]
    assert core.num_steps == 4
    assert core.num_checks == 1, "the invariants are checked before the process sleeps without work"


def test_the_inline_client_sleeps_until_a_message_or_for_a_moment(
    options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = InProcessClient(options, executor="tests.fakes.factories:plain")
    looks = []
    step, schedule = EngineCore.step, client._core.scheduler.schedule
    monkeypatch.setattr(EngineCore, "step", lambda core: looks.append(time.monotonic()) or step(core))
    monkeypatch.setattr(client._core.scheduler, "schedule", lambda now: schedule(now) if len(looks) > 6 else None)
    client.send(add("a"))
    assert first_update(client).request_id == "a"
    assert len(looks) == 7
    assert looks[-1] - looks[0] >= 6 * BLOCKED_SECONDS, "it slept between the looks"
    client.send(Abort("a"))
    client.shutdown()
