"""The engine core: what it measures at the start, how it answers, what it checks, how it fails."""

from __future__ import annotations

import dataclasses

import pytest

from quire.clock import VirtualClock
from quire.engine.core import IDLE_CHECK_SECONDS, EngineCore
from quire.engine.messages import Call
from quire.errors import InsufficientMemoryError
from quire.kv_cache.stats import EngineStats
from tests.fakes.core import CoreDriver, make_config
from tests.fakes.executor import FakeExecutor


class CountingExecutor(FakeExecutor):
    num_profiles = 0

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int):  # type: ignore[no-untyped-def]
        self.num_profiles += 1
        return super().profile(max_num_batched_tokens, max_num_seqs)


@pytest.mark.parametrize(("given", "num_profiles"), [({}, 1), ({"memory": 2**20}, 0), ({"num_blocks_override": 9}, 0)])
def test_memory_is_measured_only_when_the_pool_size_is_not_given(given: dict[str, int], num_profiles: int) -> None:
    config = make_config()
    cache = dataclasses.replace(config.cache, **{"memory": None, "num_blocks_override": None, **given})
    executor = CountingExecutor()
    core = EngineCore(dataclasses.replace(config, cache=cache), executor, VirtualClock())
    assert executor.num_profiles == num_profiles
    assert core.ready.num_blocks >= 9


def test_a_small_pool_lowers_the_context() -> None:
    core = CoreDriver(make_config(num_blocks=5, block_size=4, max_model_len=128)).core
    assert core.ready.max_model_len == 20
    assert CoreDriver(make_config(num_blocks=64, max_model_len=128)).core.ready.max_model_len == 128


@pytest.mark.parametrize("options", [{"block_size": 1}, {"windows": (None, 5)}])
def test_a_pool_that_holds_no_request_at_all_is_an_error(options: dict[str, object]) -> None:
    """Otherwise the engine would start and refuse every prompt."""
    with pytest.raises(InsufficientMemoryError, match="the KV cache has 1 blocks"):
        CoreDriver(make_config(num_blocks=1, **options))  # type: ignore[arg-type]


def test_a_window_lets_a_small_pool_keep_a_long_context() -> None:
    driver = CoreDriver(make_config(num_blocks=8, windows=(5, 5), max_num_batched_tokens=8, max_model_len=128))
    assert driver.core.ready.max_model_len == 128


def test_calls_are_answered() -> None:
    driver = CoreDriver(make_config())
    driver.add("a", list(range(1, 10)), max_tokens=1)
    driver.run()
    answer = driver.core.handle(Call(1, "stats"))
    assert answer is not None
    assert isinstance(answer.value, EngineStats)
    assert answer.value.finished_requests_total == 1
    assert driver.core.handle(Call(2, "check")).value == 0  # type: ignore[union-attr]
    assert driver.core.handle(Call(3, "reset_prefix_cache")).value == 2  # type: ignore[union-attr]
    assert "unknown method 'sing'" in driver.core.handle(Call(4, "sing")).error  # type: ignore[union-attr, operator]


def test_an_error_of_the_executor_leaves_the_step() -> None:
    driver = CoreDriver(make_config(), fail_at_step=2)
    driver.add("a", [1, 2, 3], max_tokens=8)
    driver.step()
    driver.step()
    with pytest.raises(RuntimeError, match="injected failure"):
        driver.step()


def test_invariants_are_checked_when_idle_but_not_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CoreDriver(make_config())
    checks = []
    monkeypatch.setattr(driver.scheduler, "check", lambda: checks.append(driver.clock.now()))
    for name, num_checks in (("a", 1), ("b", 1), ("c", 2)):
        if name == "c":
            driver.clock.advance(IDLE_CHECK_SECONDS)
        num_before = len(checks)
        driver.add(name, [1, 2, 3], max_tokens=3)
        while driver.core.has_work:
            driver.core.check_when_idle()  # which it is not
            driver.step()
        assert len(checks) == num_before, "the last tokens of a request do not wait for the check"
        driver.core.check_when_idle()
        assert len(checks) == num_checks


def test_the_queue_is_kept_full() -> None:
    """At depth 2 a plan is made before the result of the one before it is taken."""
    for depth in (1, 2):
        driver = CoreDriver(make_config(queue_depth=depth), record=True)
        driver.add("a", [1, 2, 3], max_tokens=6)
        driver.step()
        assert len(driver.executor.plans) == depth
        driver.run()
        assert len(driver.executor.plans) == 6
