from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from quire.clock import Clock
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.sizing import MemoryProfile
from quire.kv_cache.spec import LayerSpec
from quire.scheduler.preemption import PreemptionCosts
from quire.step import SamplingInputs, StepPlan, StepResult


class VitalSigns(NamedTuple):
    """Signs of life of workers in other processes, in seconds; the defaults for workers in this process."""

    silence: float = 0.0
    """Seconds since the last sign of the most silent worker."""
    stalled: float = math.inf
    """Time since any worker made progress, unless all are idle."""
    stopped: int | None = None
    """First rank whose process is stopped (SIGSTOP)."""


class StepFuture(Protocol):
    """Future result of a plan: `concurrent.futures.Future`, or one completed only when it is asked. The engine core
    waits for it."""

    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the result, or raise the plan's error. timeout: seconds, if another thread completes it."""
        ...

    def exception(self) -> BaseException | None:
        """Wait for the end; return the error, if any."""
        ...

    def add_done_callback(self, callback: Callable[[StepFuture], object], /) -> None:
        """Call `callback` with this future when it is done, on the thread that completes it."""
        ...


class Executor(Protocol):
    """The engine core's executor: runs plans on one or more workers, strictly in order. Life: load, profile, allocate,
    execute ..., shutdown."""

    def load_model(self) -> list[LayerSpec]:
        """Load the model; return each layer's contents of the KV cache. Raises ModelLoadError."""
        ...

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        """Measure memory in one forward pass with dummy data at the full budget."""
        ...

    def allocate(self, layout: KVCacheLayout) -> None:
        """Create the pool's tensors on every worker."""
        ...

    def measure_preemption_costs(self) -> PreemptionCosts:
        """Time a copy to the host pool and a prompt's computation. After `allocate`, before the first plan."""
        ...

    def describe_backend(self) -> str:
        """One line for people: device, threads, formats. After `load_model`."""
        ...

    def expert_counts(self) -> list[list[int]]:
        """Rows computed by each expert since the start, per layer with experts, once for all ranks. Empty without the
        option `expert_counts`."""
        ...

    def expert_ranks(self) -> list[list[list[int]]]:
        """Experts on each rank now, per layer with experts. Empty without the option `enable_eplb`."""
        ...

    def computing(self) -> AbstractContextManager[object]:
        """Context that `execute` enters on the caller's thread. A driver of many steps may enter it once for all, which
        is quicker."""
        ...

    def execute(self, plan: StepPlan) -> StepFuture:
        """Start a plan; at most `queue_depth` are outstanding. The future carries the worker's exception, if any."""
        ...

    def send_sampling_inputs(self, inputs: SamplingInputs) -> None:
        """Give the last executed plan the inputs that it announced. Until then no other plan may be executed, and its
        result is not available. The future carries errors of sampling. Raises QuireError if no plan awaits these
        inputs."""
        ...

    def idle(self) -> bool:
        """Do a piece of deferred work, while no plan is outstanding; returns whether there was any. The idle core calls
        it."""
        ...

    def vital_signs(self) -> VitalSigns:
        """Signs of life of the workers. Any thread may ask, also while a plan runs."""
        ...

    def sleep(self, level: int) -> None:
        """Free memory, while no plan is outstanding. Level 1: all of the KV cache; a device's weights move to the host.
        Level 2: the weights too. A worker may go from level 1 to level 2."""
        ...

    def wake_weights(self) -> None:
        """Restore the weights after `sleep`, without the KV cache: `wake_up` follows, or `sleep`. Raises the same as
        `wake_up`."""
        ...

    def wake_up(self) -> None:
        """Restore the state after `allocate`. Raises ModelLoadError or InsufficientMemoryError, and may then be called
        again."""
        ...

    def shutdown(self) -> None:
        """Release everything. Idempotent."""
        ...


@runtime_checkable
class KeepsTime(Protocol):
    """Executor (a simulator's) whose engine uses the executor's clock, not the system's."""

    agreed_clock: Clock


class Workers(Protocol):
    """Ranks of one model over any transport. Every call goes to all of them, in the same order. RankedExecutor calls
    it."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `Executor` (not `execute`) on every rank; the results in rank order. Raises the first rank's
        error, or EngineDeadError if a rank has ended."""
        ...

    def execute(self, plan: StepPlan) -> Future[list[StepResult]]:
        """Start a plan on every rank. Results are in rank order: whole from the first rank that samples, from the
        others without tokens and vectors, with a checksum of these."""
        ...

    def send_sampling_inputs(self, inputs: SamplingInputs) -> None:
        """`Executor.send_sampling_inputs`, to every rank."""
        ...

    def check(self) -> None:
        """Raise EngineDeadError if a rank has ended."""
        ...

    def vital_signs(self) -> VitalSigns:
        """Signs of life of all ranks; see `Executor.vital_signs`."""
        ...

    def close(self) -> None:
        """End the ranks. Idempotent."""
        ...
