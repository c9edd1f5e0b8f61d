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
from quire.kv_cache.connectors.choice import connector_of
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.stats import EngineStats, Load
from quire.multimodal.inputs import encoder_costs
from quire.outputs import SequenceUpdate
from quire.request import EngineRequest
from quire.scheduler.preemption import PreemptionCosts
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.snapshot import KVSnapshot
from quire.step import SamplingInputs, StepPlan, StepResult


class CachedBlocks(Protocol):
    """The part of the KV cache that the engine core asks directly. knows_stored: the KV connector has learned what was
    stored before the engine started. has_transfers: it has blocks to move or to release, even without live requests.
    can_transfer: and the next transfer need not wait for an earlier one."""

    @property
    def knows_stored(self) -> bool: ...

    @property
    def has_transfers(self) -> bool: ...

    @property
    def can_transfer(self) -> bool: ...

    def reset_prefix_cache(self) -> int:
        """Forget all cached content; returns the number of blocks set free."""
        ...


class EngineScheduler(Protocol):
    """Plans steps and takes their results, in order; `schedule` and `update` alternate freely otherwise."""

    @property
    def kv(self) -> CachedBlocks: ...

    @property
    def has_requests(self) -> bool:
        """Whether any request lives, running or waiting."""
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
        make_connector=connector_of(config.cache),
    )
    drafts = config.speculation
    drafter = WorkerDrafts(drafts.max_drafts, drafts.by_batch_size, adapts=drafts.adapts)
    chosen = drafter if drafts.max_drafts else NO_DRAFTER
    return Scheduler(
        config.scheduler, kv, costs, drafter=chosen, adapters=config.adapters, encoder=encoder_costs(config)
    )
