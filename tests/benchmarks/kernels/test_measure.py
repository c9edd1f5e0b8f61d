"""The method under a clock that only the runners move."""

from __future__ import annotations

import pytest

from benchmarks.kernels.measure import LONG_RUN_SECONDS, Method, Runner, Timing
from quire.clock import VirtualClock
from tests.benchmarks.kernels.builders import taking


def method(clock: VirtualClock, **options: float) -> Method:
    return Method(clock, lambda: None, sample_seconds=0.004, **options)  # type: ignore[arg-type]


def logged(name: str, runner: Runner, log: list[str]) -> Runner:
    def run() -> int:
        log.append(name)
        return runner()

    return run


def test_samples_are_seconds_of_a_unit() -> None:
    clock = VirtualClock()
    timings = method(clock, max_rounds=3).measure({"a": taking(clock, 0.001, 10), "b": taking(clock, 0.5)}, 100.0)
    assert timings["a"].samples == pytest.approx((0.0001,) * 3)
    assert timings["b"].samples == pytest.approx((0.5,) * 3)


def test_everything_runs_in_turns_and_each_round_begins_with_another() -> None:
    clock, log = VirtualClock(), list[str]()
    runners = {name: logged(name, taking(clock, 1.0), log) for name in "abc"}
    method(clock, min_rounds=3, max_rounds=3).measure(runners, 0.0)
    assert "".join(log) == "abc" + "abc" + "bca" + "cab"


def test_a_short_run_is_preceded_by_one_that_wakes_the_threads() -> None:
    clock, short, long = VirtualClock(), list[str](), list[str]()
    runners = {
        "short": logged("s", taking(clock, 0.004), short),
        "long": logged("l", taking(clock, LONG_RUN_SECONDS), long),
    }
    method(clock, min_rounds=2, max_rounds=2).measure(runners, 0.0)
    assert len(short) == 1 + 2 * 2
    assert len(long) == 1 + 2


def test_a_sample_lasts_long_enough() -> None:
    clock, log = VirtualClock(), list[str]()
    method(clock, min_rounds=1, max_rounds=1).measure({"a": logged("a", taking(clock, 0.0015), log)}, 0.0)
    assert len(log) == 1 + 1 + 3


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 3), (4.5, 4), (1e9, 15)])
def test_rounds_go_on_while_there_is_time(seconds: float, rounds: int) -> None:
    clock = VirtualClock()
    timings = method(clock).measure({"a": taking(clock, 1.0)}, seconds)
    assert len(timings["a"].samples) == rounds


def test_the_pause_comes_before_every_sample_and_is_not_timed() -> None:
    clock = VirtualClock()
    pauses = []

    def pause() -> None:
        pauses.append(clock.now())
        clock.advance(7.0)

    timings = Method(clock, pause, min_rounds=2, max_rounds=2).measure({"a": taking(clock, 1.0)}, 0.0)
    assert len(pauses) == 2
    assert timings["a"].samples == (1.0, 1.0)


def test_statistics_of_a_timing() -> None:
    timing = Timing((4.0, 1.0, 2.0, 3.0, 5.0))
    assert timing.median == 3.0
    assert timing.spread == pytest.approx(2.0 / 3.0)
    assert Timing((2.0,)).spread == 0.0
