"""Interface of the engine core to its scheduler, and the scheduler's factory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from quire.config.engine import EngineConfig
from quire.config.vision import EncoderCosts
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
    """KV cache as the engine core uses it. knows_stored: the KV connector has listed its stored blocks.
    has_transfers: it has blocks to move or release, even without live requests. can_transfer: also, the next transfer
    need not wait for an earlier one."""

    @property
    def knows_stored(self) -> bool: ...

    @property
    def has_transfers(self) -> bool: ...

    @property
    def can_transfer(self) -> bool: ...

    def reset_prefix_cache(self) -> int:
        """Clear all cached content; returns how many blocks were set free."""
        ...


class EngineScheduler(Protocol):
    """The engine core's scheduler: plans steps and processes their results, in order; `schedule` and `update` alternate
    freely otherwise."""

    @property
    def kv(self) -> CachedBlocks: ...

    @property
    def has_requests(self) -> bool:
        """True while a request runs or waits."""
        ...

    def longest_sequence(self, limit: int) -> int:
        """Longest sequence, at most `limit` tokens, that fits into the pool beside registered prefixes. In tokens; the
        engine shortens an automatic context by it."""
        ...

    def most_blocks(self, num_tokens: int) -> int:
        """Upper bound of the blocks that one sequence of `num_tokens` holds."""
        ...

    def add_request(self, source: EngineRequest, now: float, constraint: Constraint | None = None) -> None:
        """Queue a request with its constraint. Raises PromptTooLongError for a request that could never finish,
        UserError for a duplicate id or a prefix that may not be registered."""
        ...

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences, and free its blocks. Ignores unknown ids, and the index of a
        beam-search hypothesis, which belongs to no single sequence."""
        ...

    def abort_all(self, now: float) -> list[SequenceUpdate]:
        """End all requests except registrations of prefixes; the updates report it. For a pause or sleep that
        aborts."""
        ...

    def hold_new(self, is_held: bool) -> None:
        """Keep unstarted requests in the queue, or let them start again. Preempted requests continue. For a pause."""
        ...

    def expire(self, now: float) -> list[SequenceUpdate]:
        """End the requests whose time (`timeout_s`) is over, running or waiting. Called before each step; `now` in
        seconds."""
        ...

    def schedule(self, now: float) -> StepPlan | None:
        """Next step; None when nothing can be computed now (idle, or waiting for results)."""
        ...

    def schedule_transfers(self, *, awaits_report: bool = False) -> StepPlan | None:
        """Plan of the KV connector's transfers alone; None: there are none. awaits_report: return a plan in any case;
        its result comes with the connector's next report."""
        ...

    def sampling_inputs(self, plan: StepPlan) -> SamplingInputs:
        """Masks for a plan at the workers that waits for them (`masked_samples`). All earlier results must be known."""
        ...

    def awaits_masks(self, plan: StepPlan) -> bool:
        """True while masks for a plan at the workers are missing; call `settle` at each answer."""
        ...

    @property
    def can_discard(self) -> bool:
        """True if `sampling_inputs` may be called before all masks are there: the workers discard those samples."""
        ...

    @property
    def awaits_answers(self) -> bool:
        """True while a matcher (grammar) has not yet judged a sequence's new tokens."""
        ...

    @property
    def awaits_others(self) -> bool:
        """True if `settle` is due: a start, a sequence's next step or a beam search waits for a matcher (grammar), or
        an adapter's failure refuses requests."""
        ...

    def awaited(self) -> list[Matcher]:
        """Matchers whose answers the next step waits for, briefly."""
        ...

    def settle(self, now: float) -> tuple[list[SequenceUpdate], list[tuple[str, UserError]]]:
        """Continue the sequences whose matchers have answered; returns updates, and (id, reason) of refused
        requests."""
        ...

    def update(self, result: StepResult, now: float, *, may_go_ahead: bool = False) -> list[SequenceUpdate]:
        """Process the result of the oldest plan at the workers. may_go_ahead: the next plan may compute new tokens
        before matchers have answered for them."""
        ...

    def unregister_prefix(self, name: str) -> int:
        """Unregister a prefix; returns how many blocks no longer belong to one. Raises UserError for an unknown
        name."""
        ...

    def forget_rows(self, *, adapters: bool) -> None:
        """Record that the workers have dropped all request slots (and adapters), while no request lives. Called after a
        sleep."""
        ...

    def stats(self) -> EngineStats:
        """All counters and gauges. O(running sequences)."""
        ...

    def current_load(self) -> Load:
        """Statistics that take constant time. Sent with every step's outputs."""
        ...

    def snapshot(self, now: float) -> KVSnapshot: ...

    def check(self) -> None:
        """Assert all invariants. O(blocks + requests). The idle core calls it, and the control call `check`."""
        ...


SchedulerFactory: TypeAlias = Callable[[EngineConfig, KVCacheLayout, PreemptionCosts | None], EngineScheduler]
"""(configuration, allocated pool, costs measured for the preemption mode) -> scheduler."""


def paged_scheduler(
    config: EngineConfig, layout: KVCacheLayout, costs: PreemptionCosts | None, encoder: EncoderCosts | None = None
) -> Scheduler:
    """Quire's scheduler: continuous batching over a paged pool. encoder: None: the configured model's."""
    kv = KVCacheManager(
        layout,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        make_connector=connector_of(config.cache),
    )
    drafts = config.speculation
    drafter = WorkerDrafts(drafts.max_drafts, drafts.by_batch_size, adapts=drafts.adapts)
    chosen = drafter if drafts.max_drafts else NO_DRAFTER
    return Scheduler(
        config.scheduler, kv, costs, drafter=chosen, adapters=config.adapters, encoder=encoder or encoder_costs(config)
    )
