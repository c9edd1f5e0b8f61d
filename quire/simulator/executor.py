"""Executor without a device: plans in, made-up tokens out, while a virtual clock advances by predicted seconds
(docs/simulator.md). `execute` moves the clock by the host's overhead, a result to its step's end. Swapping runs beside
the model."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext

from quire.clock import VirtualClock
from quire.errors import QuireError
from quire.executors.interface import VitalSigns
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.sizing import MemoryProfile
from quire.kv_cache.spec import LayerSpec
from quire.scheduler.preemption import PreemptionCosts
from quire.simulator.adapters import AdapterWork
from quire.simulator.cost import CostModel
from quire.simulator.drafts import DraftWork
from quire.simulator.hardware import IDLE_SECONDS
from quire.simulator.jitter import make_scatter
from quire.simulator.memory import activation_bytes, device_specs
from quire.simulator.tokens import Streams
from quire.simulator.tower import TowerWork
from quire.simulator.work import StepWork
from quire.step import Candidates, SamplingInputs, StepPlan, StepResult


class SimulatedFuture(Future[StepResult]):
    """Result that is ready at a moment of the virtual clock; `result` moves the clock there. Other methods do not
    work."""

    def __init__(self, clock: VirtualClock, ready: float, result: StepResult) -> None:
        # Future.__init__ would make a lock and a condition for each step, and no thread waits for this future.
        self._clock = clock
        self._ready = ready
        self._step_result = result

    def result(self, timeout: float | None = None) -> StepResult:
        remaining = self._ready - self._clock.now()
        if remaining > 0:
            self._clock.advance(remaining)
        return self._step_result


class SimulatedExecutor:
    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        *,
        queue_depth: int = 1,
        seed: int = 0,
        adapters: AdapterWork | None = None,
        drafts: DraftWork | None = None,
    ) -> None:
        """queue_depth: above 1, the next step fills pipeline stages. seed: seed of the device's jitter."""
        self._cost = cost
        self._scatter = make_scatter(cost.hardware.jitter, seed)
        self._clock = clock
        self._is_overlapped = queue_depth > 1
        self._streams = Streams()
        self._tower = TowerWork(cost.tower)
        self.adapters, self._drafts = adapters, drafts
        self._device_free = 0.0
        self._layout: KVCacheLayout | None = None
        self._swap_seconds = 0.0
        self.busy_seconds = 0.0
        self.swap_seconds = 0.0
        self.num_steps = 0

    # -- the protocol -----------------------------------------------------------------------------------------------

    def load_model(self) -> list[LayerSpec]:
        return device_specs(self._cost.shape, self._cost.precision.kv, self._cost.layout)

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        """Device's bytes without weights, and estimated activations."""
        weights = int(self._cost.weight_bytes_per_device)
        return MemoryProfile(
            available=int(self._cost.hardware.memory) - weights,
            activations=activation_bytes(self._cost, max_num_batched_tokens, max_num_seqs),
            weights=weights,
        )

    def allocate(self, layout: KVCacheLayout) -> None:
        self._layout = layout
        self._cost.block_tokens = layout.block_size
        hardware = self._cost.hardware
        copies = layout.layers_per_group
        bandwidth = hardware.pcie_bandwidth * hardware.factors.pcie
        self._swap_seconds = copies * hardware.pcie_latency + layout.block_bytes / bandwidth

    def measure_preemption_costs(self) -> PreemptionCosts:
        """Predicted seconds of a block's copy, and of one token of a long prompt."""
        num_tokens = 1024
        chunk = StepWork(num_tokens=num_tokens, num_sequences=1, num_chunks=1)
        kinds = len(self._cost.windows)
        chunk.decode_context = [0] * kinds
        chunk.prefill_context = [num_tokens] * kinds
        chunk.prefill_pairs = [num_tokens * (num_tokens + 1) // 2] * kinds
        return PreemptionCosts(
            seconds_per_block=self._swap_seconds, seconds_per_token=self._cost.step_seconds(chunk) / num_tokens
        )

    def describe_backend(self) -> str:
        return f"simulated {self._cost.hardware.title}, {self._cost.layout}"

    def expert_counts(self) -> list[list[int]]:
        return []

    def expert_ranks(self) -> list[list[list[int]]]:
        return []

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        cost, hardware, clock = self._cost, self._cost.hardware, self._clock
        work = StepWork.of(plan, cost.windows)
        self._streams.follow(plan)
        idle = clock.now() - self._device_free
        clock.advance(
            hardware.host_overhead
            + work.num_sequences * hardware.host_overhead_per_sequence
            + self._streams.num_requests(plan) * hardware.host_overhead_per_request
            + work.num_new * hardware.host_overhead_per_new_sequence
        )
        begin = max(clock.now(), self._device_free)
        model = cost.step_seconds(work, overlapped=self._is_overlapped) + self._tower.seconds(plan.images)
        adapters = self.adapters
        if adapters is not None:
            adapters.follow(plan)
            model += adapters.seconds(plan)
            if plan.adapters is not None:
                adapters.take_orders(plan.adapters, begin)
        if idle > IDLE_SECONDS:
            model += hardware.wake_overhead
        num_drafting = 0
        if self._drafts is not None:
            model += self._drafts.seconds(plan)
            num_drafting = len(plan.num_drafts) - plan.num_drafts.count(0)
        model = self._scatter.seconds(begin, model, work.num_chunks > num_drafting)
        end = begin + model
        swapped = begin
        if work.num_swapped_out or work.num_swapped_in:
            saved = begin + work.num_swapped_out * self._swap_seconds
            if work.waits_for_swap:
                end = saved + model
            swapped = saved + work.num_swapped_in * self._swap_seconds
            self.swap_seconds += swapped - begin
        self._device_free = max(end, swapped)
        self.busy_seconds += model
        self.num_steps += 1
        # A plan without tokens and images ends when its transfers end.
        ready = end if work.num_tokens or plan.images is not None else self._device_free
        result = self._result(plan)
        if adapters is not None:
            if plan.adapters is not None and plan.adapters.awaits_report:
                ready = max(ready, adapters.awaited(begin))
            result.adapters = adapters.ended(ready)
        return SimulatedFuture(clock, ready, result)

    def send_sampling_inputs(self, inputs: SamplingInputs) -> None:
        raise QuireError("a simulated engine has no constraints on tokens")

    def idle(self) -> bool:
        return False

    def vital_signs(self) -> VitalSigns:
        return VitalSigns()

    def sleep(self, level: int) -> None:
        raise QuireError("a simulated engine does not sleep")

    def wake_weights(self) -> None:
        """Do nothing."""

    def wake_up(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""

    # -- results ----------------------------------------------------------------------------------------------------

    def _result(self, plan: StepPlan) -> StepResult:
        streams = self._streams
        if self._drafts is None:
            result = StepResult(plan.step_id, streams.sample(plan))
        else:
            result = self._drafts.result(plan, streams)
        if streams.has_beams:
            for index, token_ids, scores in streams.beams(plan):
                result.candidates[index] = Candidates(token_ids, scores)
        return result
