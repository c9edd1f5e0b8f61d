"""The executor of a device: the worker in the engine core's own process, on the caller's thread."""

from __future__ import annotations

from concurrent.futures import Future

from quire.config.engine import EngineConfig
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.sizing import MemoryProfile
from quire.kv_cache.spec import LayerSpec
from quire.scheduler.preemption import PreemptionCosts
from quire.step import StepPlan, StepResult
from quire.worker.platform.cuda import DeviceWorker


class DeviceExecutor:
    """Implements `Executor`. `execute` enqueues a plan and returns; its future waits for the device when it is asked,
    so that no thread is needed to plan and enqueue the next step meanwhile."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker: DeviceWorker | None = DeviceWorker(config)

    def load_model(self) -> list[LayerSpec]:
        return self._live_worker().load_model()

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        return self._live_worker().profile(max_num_batched_tokens, max_num_seqs)

    def allocate(self, layout: KVCacheLayout) -> None:
        self._live_worker().allocate(layout)

    def measure_preemption_costs(self) -> PreemptionCosts:
        return self._live_worker().measure_preemption_costs()

    def describe_backend(self) -> str:
        return self._live_worker().describe_backend()

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        return self._live_worker().launch(plan)

    def idle(self) -> bool:
        return self._live_worker().idle()

    def sleep(self, level: int) -> None:
        self._live_worker().sleep(level)

    def wake_up(self) -> None:
        self._live_worker().wake_up()

    def shutdown(self) -> None:
        """Wait for the work of the device, then release the model and the pool."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def _live_worker(self) -> DeviceWorker:
        if self._worker is None:
            raise RuntimeError("the executor is shut down")
        return self._worker
