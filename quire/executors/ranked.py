"""The executor of a model that several ranks share: each call goes to all of them, and their answers become one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from quire.errors import QuireError
from quire.executors.interface import VitalSigns, Workers
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.sizing import MemoryProfile
from quire.kv_cache.spec import LayerSpec
from quire.scheduler.preemption import PreemptionCosts
from quire.step import SamplingInputs, StepPlan, StepResult


class RankedExecutor:
    """Implements `Executor` by `Workers`, whose ranks are on one host and share its memory."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def load_model(self) -> list[LayerSpec]:
        first, *others = self._workers.call("load_model")
        if any(specs != first for specs in others):
            raise QuireError("the ranks disagree on what the layers keep in the KV cache")
        specs: list[LayerSpec] = first
        return specs

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        return reduce_profiles(self._workers.call("profile", max_num_batched_tokens, max_num_seqs))

    def allocate(self, layout: KVCacheLayout) -> None:
        self._workers.call("allocate", layout)

    def measure_preemption_costs(self) -> PreemptionCosts:
        """The slowest rank's: a step ends when every rank's does."""
        costs: list[PreemptionCosts] = self._workers.call("measure_preemption_costs")
        return PreemptionCosts(
            seconds_per_block=max(each.seconds_per_block for each in costs),
            seconds_per_token=max(each.seconds_per_token for each in costs),
        )

    def describe_backend(self) -> str:
        lines: list[str] = self._workers.call("describe_backend")
        return f"{lines[0]}, on each of {len(lines)} ranks"

    def expert_counts(self) -> list[list[int]]:
        """The first rank's: each computes a share of every expert, over the same rows."""
        counts: list[list[list[int]]] = self._workers.call("expert_counts")
        return counts[0]

    def computing(self) -> AbstractContextManager[object]:
        """The ranks compute in processes of their own."""
        return nullcontext()

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        started = self._workers.execute(plan)
        agreed: Future[StepResult] = Future()
        agreed.set_running_or_notify_cancel()

        def settle(results: Future[list[StepResult]]) -> None:
            try:
                agreed.set_result(agree(results.result()))
            except BaseException as error:  # whatever it is, the core waits for this future
                agreed.set_exception(error)

        started.add_done_callback(settle)
        return agreed

    def send_sampling_inputs(self, inputs: SamplingInputs) -> None:
        self._workers.send_sampling_inputs(inputs)

    def idle(self) -> bool:
        """No rank has work that can wait. Raises EngineDeadError when one has ended, so that an engine without requests
        notices it."""
        self._workers.check()
        return False

    def vital_signs(self) -> VitalSigns:
        return self._workers.vital_signs()

    def sleep(self, level: int) -> None:
        self._workers.call("sleep", level)

    def wake_weights(self) -> None:
        self._workers.call("wake_weights")

    def wake_up(self) -> None:
        self._workers.call("wake_up")

    def shutdown(self) -> None:
        self._workers.close()


def reduce_profiles(profiles: Sequence[MemoryProfile]) -> MemoryProfile:
    """What each rank may take: every rank sees the memory of the host, which they share evenly; the largest rank's
    activations and weights count."""
    return replace(
        profiles[0],
        available=min(each.available for each in profiles) // len(profiles),
        activations=max(each.activations for each in profiles),
        weights=max(each.weights for each in profiles),
    )


def agree(results: Sequence[StepResult]) -> StepResult:
    """The first rank's result. Raises QuireError when another rank sampled other tokens, because its KV cache and the
    first one's are then of different sequences, or computed another vector, because every rank adds up the same."""
    first, *others = results
    for rank, other in enumerate(others, start=1):
        if (other.step_id, other.token_ids) != (first.step_id, first.token_ids):
            raise QuireError(f"ranks 0 and {rank} disagree on the tokens of step {first.step_id}")
        if other.pooled != first.pooled:
            raise QuireError(f"ranks 0 and {rank} disagree on the pooled vectors of step {first.step_id}")
    return first
