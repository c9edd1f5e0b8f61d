"""Sleep and wake in the core: what is refused when, and that nothing cached survives."""

from __future__ import annotations

import pytest

from quire.engine.messages import Call, CallResult
from quire.errors import EngineAsleepError, InsufficientMemoryError
from tests.fakes.core import CoreDriver, make_config

PROMPT = list(range(1, 40))


def call(driver: CoreDriver, method: str, argument: str = "") -> CallResult:
    answer = driver.core.handle(Call(1, method, argument))
    assert answer is not None
    return answer


@pytest.fixture
def driver() -> CoreDriver:
    driver = CoreDriver(make_config())
    driver.add("a", PROMPT, max_tokens=4)
    driver.run()
    return driver


@pytest.mark.parametrize("level", ["1", "2"])
def test_nothing_cached_survives_sleep(driver: CoreDriver, level: str) -> None:
    assert driver.core.stats().num_cached_blocks > 0
    assert call(driver, "is_sleeping").value == 0
    assert call(driver, "sleep", level).value == int(level)
    assert driver.executor.asleep == int(level)
    assert call(driver, "is_sleeping").value == 1
    assert driver.core.stats().num_cached_blocks == 0
    assert call(driver, "wake_up").error is None
    assert (driver.executor.asleep, call(driver, "is_sleeping").value) == (0, 0)
    driver.add("b", PROMPT, max_tokens=4)
    driver.run()  # the fake executor checks that no block is read that was not written since
    assert driver.core.stats().prefix_cache_hits_total == 0


def test_requests_are_refused_while_it_sleeps(driver: CoreDriver) -> None:
    call(driver, "sleep", "1")
    driver.add("b", PROMPT, max_tokens=4)
    (rejected,) = driver.core.step().rejections
    assert rejected.request_id == "b"
    assert isinstance(rejected.error(), EngineAsleepError)
    assert not driver.core.has_work
    call(driver, "wake_up")
    driver.add("b", PROMPT, max_tokens=4)
    driver.run()


def test_it_does_not_sleep_while_requests_live(driver: CoreDriver) -> None:
    driver.add("b", PROMPT, max_tokens=4)
    answer = call(driver, "sleep", "1")
    assert "while requests live: 0 run and 1 wait" in str(answer.error)
    driver.core.step()
    assert "while requests live: 1 run and 0 wait" in str(call(driver, "sleep", "2").error)
    assert driver.executor.asleep == 0
    driver.run()
    assert call(driver, "sleep", "2").error is None


def test_who_cannot_fall_asleep_goes_on(driver: CoreDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers still have rows of ended requests, and are told to drop them."""

    def refuse(level: int) -> None:
        raise InsufficientMemoryError("no room on the host")

    with monkeypatch.context() as patch:
        patch.setattr(driver.executor, "sleep", refuse)
        assert "no room on the host" in str(call(driver, "sleep", "1").error)
    assert call(driver, "is_sleeping").value == 0
    before = driver.executor.live_seq_ids
    driver.add("b", PROMPT, max_tokens=4)
    driver.run()
    assert before
    assert not set(before) & set(driver.executor.live_seq_ids)


@pytest.mark.parametrize("level", ["", "0", "3", "deep"])
def test_levels_that_there_are_not(driver: CoreDriver, level: str) -> None:
    assert "level of sleep must be 1 or 2" in str(call(driver, "sleep", level).error)
    assert call(driver, "is_sleeping").value == 0


def test_asleep_twice_and_more_deeply(driver: CoreDriver) -> None:
    for level, expected in (("1", 1), ("1", 1), ("2", 2), ("1", 2)):
        assert call(driver, "sleep", level).value == expected
        assert driver.executor.asleep == expected
    for _ in range(2):
        assert call(driver, "wake_up").error is None
    assert driver.executor.asleep == 0


def test_weights_wake_up_first(driver: CoreDriver) -> None:
    assert call(driver, "wake_up", "kv_cache").error is None  # awake already
    call(driver, "sleep", "2")
    assert "weights sleep" in str(call(driver, "wake_up", "kv_cache").error)
    assert "must be one of" in str(call(driver, "wake_up", "scales").error)
    assert not driver.executor.has_woken_weights
    assert call(driver, "wake_up", "weights").value == 2
    assert driver.executor.has_woken_weights
    assert (driver.executor.asleep, call(driver, "is_sleeping").value) == (2, 1)
    assert call(driver, "sleep", "1").value == 2  # they sleep again
    assert "weights sleep" in str(call(driver, "wake_up", "kv_cache").error)
    call(driver, "wake_up", "weights")
    assert call(driver, "wake_up", "kv_cache").value == 0
    driver.add("b", PROMPT, max_tokens=4)
    driver.run()


def test_who_cannot_wake_stays_asleep_and_may_try_again(driver: CoreDriver) -> None:
    call(driver, "sleep", "2")
    driver.executor.wake_error = InsufficientMemoryError("no memory on the device for the weights")
    assert call(driver, "wake_up").error == "no memory on the device for the weights"
    assert call(driver, "is_sleeping").value == 1
    driver.executor.wake_error = None
    assert call(driver, "wake_up").error is None
    driver.add("b", PROMPT, max_tokens=4)
    driver.run()


def test_registered_prefixes_keep_it_awake(driver: CoreDriver) -> None:
    driver.register_prefix("p", PROMPT)
    driver.run()
    assert "while prefixes are registered" in str(call(driver, "sleep", "1").error)
    call(driver, "unregister_prefix", "p")
    assert call(driver, "sleep", "1").error is None


def test_idle_work_is_for_when_nothing_else_is_to_do(driver: CoreDriver) -> None:
    driver.executor.idle_work = 2
    driver.add("b", PROMPT, max_tokens=1)
    assert not driver.core.idle()
    driver.run()
    assert [driver.core.idle() for _ in range(2)] == [True, True]
    assert not driver.masks.is_prepared
    assert not driver.core.idle()
    assert driver.masks.is_prepared, "what the first constraint would wait for comes last"
    call(driver, "sleep", "1")
    driver.executor.idle_work = 9
    assert not driver.core.idle()
