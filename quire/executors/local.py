"""The executor of an engine whose model runs in the engine core's own process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from quire.config.engine import EngineConfig
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.sizing import MemoryProfile
from quire.kv_cache.spec import LayerSpec
from quire.scheduler.preemption import PreemptionCosts
from quire.step import StepPlan, StepResult
from quire.worker.platform.choice import make_platform
from quire.worker.platform.interface import Platform
from quire.worker.worker import Worker

Result = TypeVar("Result")


class LocalExecutor:
    """Implements `Executor`. The platform says how plans run.

    Inline: inside `execute`, whose future is then complete. On a thread: everything runs there, in order, while the
    caller plans the next step (torch releases the interpreter while it computes, so the two threads do overlap).
    Queued: `execute` enqueues the plan; its future waits for the device when it is asked, so that no thread is needed.
    """

    def __init__(self, config: EngineConfig, platform: Platform | None = None) -> None:
        """platform: None: the one that the configuration asks for."""
        platform = make_platform(config) if platform is None else platform
        self._mode = platform.mode(config.scheduler.queue_depth)
        self._thread = WorkerThread("quire-worker") if self._mode == "thread" else None
        self._worker: Worker | None = Worker(config, platform)

    def load_model(self) -> list[LayerSpec]:
        return self._call(self._live_worker().load_model)

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        return self._call(self._live_worker().profile, max_num_batched_tokens, max_num_seqs)

    def allocate(self, layout: KVCacheLayout) -> None:
        self._call(self._live_worker().allocate, layout)

    def measure_preemption_costs(self) -> PreemptionCosts:
        return self._call(self._live_worker().measure_preemption_costs)

    def describe_backend(self) -> str:
        return self._live_worker().describe_backend()

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        worker = self._live_worker()
        if self._thread is not None:
            return self._thread.submit(worker.execute, plan)
        pending = worker.launch(plan)
        if self._mode == "inline":
            pending.settle()
        return pending

    def idle(self) -> bool:
        return self._call(self._live_worker().idle)

    def sleep(self, level: int) -> None:
        self._call(self._live_worker().sleep, level)

    def wake_up(self) -> None:
        self._call(self._live_worker().wake_up)

    def shutdown(self) -> None:
        """Wait for the plans that were started, then release the model and the pool."""
        if self._thread is not None:
            self._thread.close()
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def _call(self, method: Callable[..., Result], *arguments: Any) -> Result:
        return method(*arguments) if self._thread is None else self._thread.submit(method, *arguments).result()

    def _live_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the executor is shut down")
        return self._worker


class WorkerThread:
    """Runs the calls on one daemon thread, which holds a reference to nothing but the call it runs."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run_calls, args=(self._calls,), name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Start `call(*arguments)`; the future carries its result or its exception. It cannot be cancelled: every later
        plan relies on the effects of this one."""
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        self._calls.put((future, call, arguments))
        return future

    def close(self) -> None:
        """Return when everything submitted has run. Idempotent; nothing may be submitted afterwards."""
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


def _settle(future: Future[Any], call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Run the call and complete the future with what comes of it."""
    try:
        result = call(*arguments)
    except BaseException as error:  # a thread that ended here would leave the core waiting for this future
        future.set_exception(error)
    else:
        future.set_result(result)
