"""Threads that take work in turns: whose comes next, and what long work leaves to short."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from quire.clock import VirtualClock
from quire.utils.fair_threads import CALLER, UNITS_PER_SECOND, FairThreads


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def one(clock: VirtualClock) -> Iterator[FairThreads]:
    threads = FairThreads(1, "one", long_size=100, clock=clock)
    yield threads
    threads.shutdown(wait=True)


class Gate:
    """Work that holds a thread until it is opened."""

    def __init__(self, threads: FairThreads, size: int) -> None:
        self._open, self._begun = threading.Event(), threading.Event()
        self._future = threads.submit(size, self._work)

    def _work(self) -> None:
        self._begun.set()
        self._open.wait()

    def wait_begun(self) -> None:
        self._begun.wait()

    @property
    def has_begun(self) -> bool:
        return self._begun.is_set()

    def open(self) -> None:
        self._open.set()
        self._future.result()


def noted(threads: FairThreads, done: list[str], caller: str, size: int, name: str) -> Future[None]:
    token = CALLER.set(caller)
    try:
        return threads.submit(size, lambda: done.append(name))
    finally:
        CALLER.reset(token)


def test_callers_take_turns_and_of_one_the_shortest_work_comes_first(one: FairThreads) -> None:
    done: list[str] = []
    gate = Gate(one, 1)
    gate.wait_begun()
    waiting = [noted(one, done, "a", size, f"a{size}") for size in (3, 1, 2)] + [noted(one, done, "b", 9, "b9")]
    gate.open()
    for future in waiting:
        future.result()
    assert done == ["a1", "b9", "a2", "a3"]


def test_work_that_has_waited_comes_before_shorter_work_that_is_new(one: FairThreads, clock: VirtualClock) -> None:
    done: list[str] = []
    gate = Gate(one, 1)
    gate.wait_begun()
    waiting = [noted(one, done, "a", 2 * UNITS_PER_SECOND, "old")]
    clock.advance(1.0)
    waiting.append(noted(one, done, "a", UNITS_PER_SECOND // 2, "shorter"))
    clock.advance(1.5)
    waiting.append(noted(one, done, "a", 1, "new"))
    gate.open()
    for future in waiting:
        future.result()
    assert done == ["shorter", "old", "new"]


def test_long_work_leaves_a_thread_to_short_work(clock: VirtualClock) -> None:
    two = FairThreads(2, "two", long_size=100, clock=clock)
    first, second = Gate(two, 101), Gate(two, 101)
    first.wait_begun()
    done: list[str] = []
    noted(two, done, "b", 100, "short").result()
    assert done == ["short"]
    assert not second.has_begun
    first.open()
    second.wait_begun()
    second.open()
    two.shutdown(wait=True)


def test_work_that_is_cancelled_is_let_go_at_once_and_never_done(one: FairThreads) -> None:
    class Body:
        pass

    done: list[Body] = []
    body = Body()
    kept = weakref.ref(body)
    gate = Gate(one, 1)
    gate.wait_begun()
    future = one.submit(1, functools.partial(done.append, body))
    del body
    assert future.cancel()
    assert kept() is None
    gate.open()
    assert one.submit(1, lambda: "next").result() == "next"
    assert not done


def test_work_that_is_refused_is_never_done(one: FairThreads) -> None:
    done: list[str] = []
    gate = Gate(one, 1)
    accepted = noted(one, done, "", 1, "accepted")
    one.shutdown(wait=False)
    with pytest.raises(RuntimeError):
        noted(one, done, "", 0, "refused")
    gate.open()
    accepted.result()
    one.shutdown(wait=True)
    assert done == ["accepted"]


def test_an_error_is_the_futures(one: FairThreads) -> None:
    def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        one.submit(1, fail).result()
    assert one.submit(1, lambda: 1).result() == 1


@pytest.mark.parametrize("fails", [False, True])
def test_what_work_brings_is_freed_with_its_last_user(one: FairThreads, fails: bool) -> None:
    """Not by a collection of garbage: to free a large body takes milliseconds, in whichever thread that runs."""

    class Body:
        pass

    def work() -> Body:
        body = Body()
        kept.append(weakref.ref(body))
        if fails:
            raise ValueError("wrong")
        return body

    kept: list[weakref.ref[Body]] = []
    gc.disable()
    try:
        for _ in range(3):
            future = one.submit(1, work)
            assert (future.exception() is not None) == fails
            del future
        one.submit(1, lambda: None).result()  # the thread has let go of the last work
        assert [each() for each in kept] == [None] * 3
    finally:
        gc.enable()
