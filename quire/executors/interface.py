"""The interface between the engine core and the executor, which runs the model on one or more workers."""

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
    """Of workers in other processes, in seconds; of others nothing is to be said."""

    silence: float = 0.0
    """The longest time for which nothing was heard of a worker."""
    stalled: float = math.inf
    """For how long none of them has got on, as far as they are not idle."""
    stopped: int | None = None
    """The first rank whose process is stopped (SIGSTOP)."""


class StepFuture(Protocol):
    """The result of a plan, which is to come. A `concurrent.futures.Future` is one; another one may be completed only
    when it is asked."""

    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the result, or raise what went wrong. timeout: seconds, where another thread completes it."""
        ...

    def exception(self) -> BaseException | None:
        """Wait for the end; return what went wrong."""
        ...

    def add_done_callback(self, callback: Callable[[StepFuture], object], /) -> None:
        """Call it with this future when it is done, on the thread that completes it."""
        ...


class Executor(Protocol):
    """Runs plans on one or more workers, strictly in order. Life: load, profile, allocate, execute ..., shutdown."""

    def load_model(self) -> list[LayerSpec]:
        """Load the model; return what each layer keeps in the KV cache. Raises ModelLoadError."""
        ...

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        """One forward pass with dummy data at the full budget, to measure memory."""
        ...

    def allocate(self, layout: KVCacheLayout) -> None:
        """Create the pool's tensors on every worker."""
        ...

    def measure_preemption_costs(self) -> PreemptionCosts:
        """Time a copy to the host pool and a prompt's computation. After `allocate`, before the first plan."""
        ...

    def describe_backend(self) -> str:
        """One line for people: what computes, with how many threads, in which formats. After `load`."""
        ...

    def expert_counts(self) -> list[list[int]]:
        """By layer with experts: rows that each of them has computed since the start, once for all ranks. Empty without
        the option `expert_counts`."""
        ...

    def computing(self) -> AbstractContextManager[object]:
        """What `execute` enters on the caller's thread. A driver of many steps may enter it once for all of them, which
        is quicker; the results are the same."""
        ...

    def execute(self, plan: StepPlan) -> StepFuture:
        """Start a plan; at most `queue_depth` are outstanding. The future carries the worker's exception, if any."""
        ...

    def send_sampling_inputs(self, inputs: SamplingInputs) -> None:
        """Give the last plan that was executed the inputs that it announced. Until then no other plan may be executed,
        and its result cannot be had. What goes wrong in sampling is the future's. Raises QuireError when no plan awaits
        these."""
        ...

    def idle(self) -> bool:
        """Do a piece of the work that can wait, while no plan is outstanding; returns whether there was any."""
        ...

    def vital_signs(self) -> VitalSigns:
        """Whether the workers live. Any thread may ask, also while a plan runs; at every beat one does."""
        ...

    def sleep(self, level: int) -> None:
        """Give memory back, while no plan is outstanding: level 1 all of the KV cache, and the weights of a device to
        the host; level 2 the weights as well. A worker that sleeps at level 1 may be sent to level 2."""
        ...

    def wake_weights(self) -> None:
        """Have the weights as before `sleep`, and still no KV cache: `wake_up` follows, or `sleep`. Raises as
        `wake_up`."""
        ...

    def wake_up(self) -> None:
        """Be as after `allocate`. Raises ModelLoadError or InsufficientMemoryError, and may then be called again."""
        ...

    def shutdown(self) -> None:
        """Release everything. Idempotent."""
        ...


@runtime_checkable
class KeepsTime(Protocol):
    """An executor whose engine goes by another clock than the system's."""

    agreed_clock: Clock


class Workers(Protocol):
    """The ranks of one model, however they are reached. Every call goes to all of them, in the same order."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `Executor` (not `execute`) on every rank; the results in rank order. Raises the first
        rank's error, or EngineDeadError when a rank has ended."""
        ...

    def execute(self, plan: StepPlan) -> Future[list[StepResult]]:
        """Start a plan on every rank. The results are in rank order; of all but the first of those that sample without
        tokens and vectors, of which there is a checksum."""
        ...

    def send_sampling_inputs(self, inputs: SamplingInputs) -> None:
        """As `Executor.send_sampling_inputs`, to every rank."""
        ...

    def check(self) -> None:
        """Raise EngineDeadError when a rank has ended."""
        ...

    def vital_signs(self) -> VitalSigns:
        """As `Executor.vital_signs`."""
        ...

    def close(self) -> None:
        """End the ranks. Idempotent."""
        ...
