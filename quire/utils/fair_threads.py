"""Threads that serve callers in turns, short work first."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire.clock import Clock, SystemClock

CALLER: ContextVar[str] = ContextVar("caller", default="")
"""Caller of a task's work: in a server its client's key name or address."""
UNITS_PER_SECOND = 2**18
"""Rate at which work of one caller is ordered: long-waiting work comes before shorter new work."""

T = TypeVar("T")


@dataclass(order=True, slots=True)
class _Item:
    due: float
    number: int
    is_long: bool = field(compare=False)
    work: list[Callable[[], Any]] = field(compare=False)
    """Callable; empty once the work has begun or was cancelled."""
    future: Future[Any] = field(compare=False)


class FairThreads:
    """Up to `num_threads` threads. Work of more than `long_size` units runs on all but one of them, or on the only one.
    Thread-safe. clock: seconds, for the order of waiting work."""

    def __init__(self, num_threads: int, name: str, *, long_size: float, clock: Clock | None = None) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_long = max(1, num_threads - 1)
        self._long_size = long_size
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._waiting: dict[str, list[_Item]] = {}
        """Caller -> heap of waiting work, in the order of turns."""
        self._num_long = 0
        self._numbers = itertools.count()

    def submit(self, size: float, work: Callable[[], T]) -> Future[T]:
        """Run `work` of `size` units for CALLER in its turn. A future cancelled before drops its work at once. Raises
        RuntimeError after `shutdown`."""
        due = self._clock.now() + size / UNITS_PER_SECOND
        kept = [work]
        item = _Item(due, next(self._numbers), size > self._long_size, kept, Future())

        def drop(future: Future[T]) -> None:
            if future.cancelled():
                kept.clear()

        item.future.add_done_callback(drop)
        with self._lock:
            self._threads.submit(self._work)  # first: what is refused does not wait
            heapq.heappush(self._waiting.setdefault(CALLER.get(), []), item)
        return item.future

    def shutdown(self, *, wait: bool) -> None:
        """Refuse further work, and end the threads after the waiting work."""
        self._threads.shutdown(wait=wait)

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._do(item)
            finally:
                if item.is_long:
                    with self._lock:
                        self._num_long -= 1
            del item  # nothing of it is kept while this thread waits

    def _do(self, item: _Item) -> None:
        if not item.future.set_running_or_notify_cancel():
            return
        work = item.work.pop()
        try:
            item.future.set_result(work())
        except BaseException as error:
            item.future.set_exception(error)
        finally:
            del item, work  # the error has this frame in its traceback

    def _next(self) -> _Item | None:
        with self._lock:
            for caller, items in list(self._waiting.items()):
                while items and items[0].future.cancelled():
                    heapq.heappop(items)
                index = self._first_allowed(items)
                if index is not None:
                    item = items.pop(index)
                    heapq.heapify(items)
                    del self._waiting[caller]
                    if items:
                        self._waiting[caller] = items  # behind the others
                    self._num_long += item.is_long
                    return item
                if not items:
                    del self._waiting[caller]
        return None

    def _first_allowed(self, items: list[_Item]) -> int | None:
        if self._num_long < self._max_long:
            return 0 if items else None
        allowed = [index for index, item in enumerate(items) if not item.is_long]
        return min(allowed, key=items.__getitem__, default=None)
