"""Executor that runs the model in the engine core's own process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

from quire.config.engine import EngineConfig
from quire.errors import QuireError
from quire.executors.interface import StepFuture, VitalSigns
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.sizing import MemoryProfile
from quire.kv_cache.spec import LayerSpec
from quire.scheduler.preemption import PreemptionCosts
from quire.step import SamplingInputs, StepPlan, StepResult
from quire.worker.columns import STEP_COLUMNS, Column
from quire.worker.overlays import OverlaySource
from quire.worker.pending_step import PendingStep
from quire.worker.platform.choice import make_platform
from quire.worker.platform.interface import Platform
from quire.worker.worker import Worker

Result = TypeVar("Result")


class Unsent(NamedTuple):
    """Plan that lacks its sampling inputs. launched: worker's pending step, which is the result as well; on a
    thread, the future of that."""

    step_id: int
    result: PendingStep | Future[StepResult]
    launched: PendingStep | Future[PendingStep]


class LocalExecutor:
    """Implements `Executor`. The platform chooses how plans run.

    Inline: inside `execute`. On a thread: everything runs there, in order, while the caller plans the next step.
    Queued: `execute` enqueues the plan; its future waits for the device when asked.
    """

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform | None = None,
        columns: Sequence[Column] = STEP_COLUMNS,
        overlays: OverlaySource | None = None,
    ) -> None:
        """Executor of one worker in this process. platform: None: the configuration's. columns, overlays: see
        Worker."""
        platform = make_platform(config) if platform is None else platform
        self._mode = platform.mode(config.scheduler.queue_depth)
        self._thread = WorkerThread("quire-worker") if self._mode == "thread" else None
        self._worker: Worker | None = Worker(config, platform, columns, overlays)
        self._unsent: Unsent | None = None
        """Last plan, while it lacks its sampling inputs."""

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

    def expert_counts(self) -> list[list[int]]:
        return self._call(self._live_worker().expert_counts)

    def expert_ranks(self) -> list[list[list[int]]]:
        return self._call(self._live_worker().expert_ranks)

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext() if self._thread is not None else self._live_worker().platform.computing()

    def execute(self, plan: StepPlan) -> StepFuture:
        worker = self._live_worker()
        if self._unsent is not None:
            raise QuireError(f"step {plan.step_id} comes before the sampling inputs of step {self._unsent.step_id}")
        if plan.masked_samples:
            return self._launch(plan, worker)
        if self._thread is not None:
            return self._thread.submit(worker.execute, plan)
        pending = worker.launch(plan)
        if self._mode == "inline":
            pending.settle()
        return pending

    def _launch(self, plan: StepPlan, worker: Worker) -> StepFuture:
        if self._thread is None:
            pending = worker.launch(plan)
            self._unsent = Unsent(plan.step_id, pending, pending)
        else:
            result: Future[StepResult] = Future()
            result.set_running_or_notify_cancel()
            self._unsent = Unsent(plan.step_id, result, self._thread.submit(worker.launch, plan))
        return self._unsent.result

    def send_sampling_inputs(self, inputs: SamplingInputs) -> None:
        worker, unsent = self._live_worker(), self._unsent
        if unsent is None or unsent.step_id != inputs.step_id:
            raise QuireError(f"step {inputs.step_id} awaits no sampling inputs")
        self._unsent = None
        if isinstance(unsent.launched, PendingStep):
            worker.send_sampling_inputs(inputs)
            if self._mode == "inline":
                unsent.launched.settle()
        else:
            assert self._thread is not None, "a plan was launched on it"
            self._thread.submit(_settle, unsent.result, _sample, (worker, unsent.launched, inputs))

    def idle(self) -> bool:
        return self._call(self._live_worker().idle)

    def vital_signs(self) -> VitalSigns:
        return VitalSigns()

    def sleep(self, level: int) -> None:
        self._call(self._live_worker().sleep, level)

    def wake_weights(self) -> None:
        self._call(self._live_worker().wake_weights)

    def wake_up(self) -> None:
        self._call(self._live_worker().wake_up)

    def shutdown(self) -> None:
        """Wait for the started plans, then release the model and the pool."""
        if self._thread is not None:
            self._thread.close()
        unsent, self._unsent = self._unsent, None
        if unsent is not None and isinstance(unsent.result, Future):
            error = f"the executor was shut down before step {unsent.step_id} had its sampling inputs"
            unsent.result.set_exception(QuireError(error))
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
    """Runs a worker's calls in order on one daemon thread, which holds a reference only to the call it runs."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run_calls, args=(self._calls,), name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Start `call(*arguments)`; the future, which cannot be cancelled, carries its result or exception."""
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


def _sample(worker: Worker, launched: Future[PendingStep], inputs: SamplingInputs) -> StepResult:
    pending = launched.result()
    worker.send_sampling_inputs(inputs)
    return pending.result()


def _settle(future: Future[Any], call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        result = call(*arguments)
    except BaseException as error:  # a thread that ended here would leave the core waiting for this future
        future.set_exception(error)
    else:
        future.set_result(result)
