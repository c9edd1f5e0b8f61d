"""The interface between the engine core and its scheduler, and the factory of the scheduler.

The product has one scheduler, `quire.scheduler.scheduler.Scheduler`. The protocol exists because the paper's baselines
(benchmarks/baselines/) drive the same engine core, real or simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from quire.config.engine import EngineConfig
from quire.decoding.drafts import NO_DRAFTER, WorkerDrafts
from quire.decoding.masks import Constraint, Matcher
from quire.errors import UserError
from quire.kv_cache.connectors.interface import no_connector
from quire.kv_cache.connectors.offload import OffloadConnector
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.stats import EngineStats, Load
from quire.outputs import SequenceUpdate
from quire.request import EngineRequest
from quire.scheduler.preemption import PreemptionCosts
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.snapshot import KVSnapshot
from quire.step import SamplingInputs, StepPlan, StepResult


class PrefixCache(Protocol):
    """The part of the KV cache that the engine core calls directly."""

    def reset_prefix_cache(self) -> int:
        """Forget all cached content; returns the number of blocks set free."""
        ...


class EngineScheduler(Protocol):
    """Plans steps and takes their results, in order; `schedule` and `update` alternate freely otherwise."""

    @property
    def kv(self) -> PrefixCache: ...

    @property
    def has_requests(self) -> bool:
        """Whether any request lives, running or waiting."""
        ...

    @property
    def is_connector_ready(self) -> bool:
        """Whether the KV connector has learned what was stored before the engine started."""
        ...

    @property
    def has_transfers(self) -> bool:
        """Whether the KV connector has blocks to move, even without live requests."""
        ...

    @property
    def can_transfer(self) -> bool:
        """Whether `has_transfers`, and the next transfer need not wait for an earlier one."""
        ...

    def longest_sequence(self, limit: int) -> int:
        """The longest sequence, up to `limit` tokens, that the pool can hold."""
        ...

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that one sequence of `num_tokens` holds at most."""
        ...

    def add_request(self, source: EngineRequest, now: float, constraint: Constraint | None = None) -> None:
        """Queue a request. constraint: the one that it names. Raises UserError when it is rejected."""
        ...

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences, now. Unknown ids are ignored."""
        ...

    def abort_all(self, now: float) -> list[SequenceUpdate]:
        """End all requests but the registrations of prefixes; the updates report the ends."""
        ...

    def hold_new(self, is_held: bool) -> None:
        """Keep requests that have not started in the queue, or start them again."""
        ...

    def expire(self, now: float) -> list[SequenceUpdate]:
        """End the requests whose time is over."""
        ...

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, None when nothing can be computed now."""
        ...

    def schedule_transfers(self, *, awaits_report: bool = False) -> StepPlan | None:
        """A plan that computes nothing and moves cached blocks, if there are any to move."""
        ...

    def sampling_inputs(self, plan: StepPlan) -> SamplingInputs:
        """The second message of a plan in flight that expects one, when the results of all earlier plans are known."""
        ...

    def awaits_masks(self, plan: StepPlan) -> bool:
        """Masks that a plan in flight expects are still to come; `settle` is due when something has come."""
        ...

    @property
    def can_discard(self) -> bool:
        """`sampling_inputs` may be asked for while masks are still to come: the workers discard those samples."""
        ...

    @property
    def awaits_answers(self) -> bool:
        """Matchers have yet to answer."""
        ...

    @property
    def awaits_others(self) -> bool:
        """Matchers have yet to answer of which no step goes ahead."""
        ...

    def awaited(self) -> list[Matcher]:
        """The matchers whose answers a step waits for, briefly, before it is planned."""
        ...

    def settle(self, now: float) -> tuple[list[SequenceUpdate], list[tuple[str, UserError]]]:
        """Go on with what matchers have answered: updates, and the requests that are refused, with the reasons."""
        ...

    def update(self, result: StepResult, now: float, *, may_go_ahead: bool = False) -> list[SequenceUpdate]:
        """Take the result of the oldest plan in flight. may_go_ahead: the next plan may compute new tokens before
        matchers have answered for them."""
        ...

    def unregister_prefix(self, name: str) -> int:
        """Unregister a prefix; returns the number of blocks set free. Raises UserError for an unknown name."""
        ...

    def forget_rows(self) -> None:
        """Note that the workers have dropped all request slots, while no request lives."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot of all counters and gauges. O(running sequences)."""
        ...

    def current_load(self) -> Load:
        """The statistics that take constant time."""
        ...

    def snapshot(self) -> KVSnapshot: ...

    def check(self) -> None:
        """Assert all invariants."""
        ...


SchedulerFactory: TypeAlias = Callable[[EngineConfig, KVCacheLayout, PreemptionCosts | None], EngineScheduler]
"""(configuration, the pool that was allocated, measured costs where the preemption mode needs them) -> scheduler."""


def paged_scheduler(config: EngineConfig, layout: KVCacheLayout, costs: PreemptionCosts | None) -> Scheduler:
    """The product's own: continuous batching over a paged pool."""
    kv = KVCacheManager(
        layout,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        make_connector=no_connector if config.cache.offload_dir is None else OffloadConnector,
    )
    max_drafts = config.speculation.max_drafts
    drafter = WorkerDrafts(max_drafts) if max_drafts else NO_DRAFTER
    return Scheduler(config.scheduler, kv, costs, drafter=drafter, adapters=config.adapters)
