"""The executor that runs the worker in the engine core's own process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from quire.config.engine import EngineConfig
from quire.errors import is_interrupt
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.sizing import MemoryProfile
from quire.kv_cache.spec import LayerSpec
from quire.parallel.interface import ProcessGroup
from quire.parallel.single import SINGLE_RANK
from quire.scheduler.preemption import PreemptionCosts
from quire.step import StepPlan, StepResult
from quire.worker.worker import Worker

Result = TypeVar("Result")


class InProcessExecutor:
    """Implements `Executor`. With queue_depth 1 a plan runs inside `execute`, whose future is then complete; with
    queue_depth 2 everything runs on one thread of its own, in order, while the caller plans the next step.

    torch releases the interpreter while it computes, so the two threads do overlap.
    """

    def __init__(self, config: EngineConfig, group: ProcessGroup = SINGLE_RANK) -> None:
        """group: the ranks that share the model; every one runs the same plans."""
        self._thread: CallRunner = (
            WorkerThread("quire-worker") if config.scheduler.queue_depth > 1 else InlineWorkerThread()
        )
        self._worker: Worker | None = Worker(config, group)

    def load_model(self) -> list[LayerSpec]:
        return self._thread.submit(self._live_worker().load_model).result()

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        return self._thread.submit(self._live_worker().profile, max_num_batched_tokens, max_num_seqs).result()

    def allocate(self, layout: KVCacheLayout) -> None:
        self._thread.submit(self._live_worker().allocate, layout).result()

    def measure_preemption_costs(self) -> PreemptionCosts:
        return self._thread.submit(self._live_worker().measure_preemption_costs).result()

    def describe_backend(self) -> str:
        return self._live_worker().describe_backend()

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        return self._thread.submit(self._live_worker().execute, plan)

    def idle(self) -> bool:
        return False

    def sleep(self, level: int) -> None:
        self._thread.submit(self._live_worker().sleep, level).result()

    def wake_up(self) -> None:
        self._thread.submit(self._live_worker().wake_up).result()

    def shutdown(self) -> None:
        """Wait for plans that were started, then release the model and the pool."""
        self._thread.close()
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def _live_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the executor is shut down")
        return self._worker


class CallRunner(Protocol):
    """Runs calls one after the other."""

    def submit(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Start `call(*arguments)`; the future carries its result or its exception."""
        ...

    def close(self) -> None:
        """Return when everything submitted has run. Idempotent; nothing may be submitted afterwards."""
        ...


class InlineWorkerThread:
    """Runs each call at once, on the caller's thread."""

    def submit(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        future = _started()
        _settle(future, call, arguments)
        if (error := future.exception()) is not None and is_interrupt(error):
            raise error  # Ctrl-C is for the caller, whose thread this is
        return future

    def close(self) -> None:
        """Nothing is ever outstanding."""


class WorkerThread:
    """Runs the calls on one daemon thread, which holds a reference to nothing but the call it runs."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run_calls, args=(self._calls,), name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        future = _started()
        self._calls.put((future, call, arguments))
        return future

    def close(self) -> None:
        if self._thread.is_alive():
            self._calls.put(None)
            self._thread.join()

    def __del__(self) -> None:
        # An executor that was dropped without a shutdown must not leave its thread waiting for ever.
        self._calls.put(None)


def _run_calls(calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]) -> None:
    while (entry := calls.get()) is not None:
        _settle(*entry)
        del entry  # else the last call's future, and what it holds, would live until the next call


def _started() -> Future[Any]:
    """A future that cannot be cancelled: every later plan relies on the effects of this one."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _settle(future: Future[Any], call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Run the call and complete the future with what comes of it."""
    try:
        result = call(*arguments)
    except BaseException as error:  # a thread that ended here would leave the core waiting for this future
        future.set_exception(error)
    else:
        future.set_result(result)
