"""Admitter: starts waiting requests, in order, beside the running sequences of one plan."""

from __future__ import annotations

import math

from quire.decoding.parallel import num_shared_tokens
from quire.decoding.sequence import Deferral, Request, RequestStatus, Sequence
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.admission import Limits, Quote, blocks_in_use, has_room, quote
from quire.scheduler.encoding import ImageEncodings
from quire.scheduler.gates import Gates, GateStage, Reservations, is_deferred
from quire.scheduler.plan_builder import PlanBuilder, PlanChanges
from quire.scheduler.preemption import (
    NO_PREEMPTION,
    Choice,
    PreemptionPlan,
    comes_before_running,
    plan_preemption,
    release_blocks,
    swap_in,
)
from quire.scheduler.running import Collections

PIECE_TOKENS = 2**14
"""Tokens hashed in a pass beside running sequences, over all long prompts."""
SHORT_TOKENS = 2**10
"""Unhashed tokens up to which prompts never wait for hashing."""
HASHING_PROMPT = "hashing prompt"


class Admitter:
    """Moves requests from the queue to the running set, and preempted ones back. Part of `Scheduler.schedule`."""

    def __init__(
        self,
        kv: KVCacheManager,
        limits: Limits,
        gates: Gates,
        collections: Collections,
        changes: PlanChanges,
        prefers_swap: Choice,
        images: ImageEncodings,
    ) -> None:
        """prefers_swap: rule that decides whether a preempted request's blocks move to the host or are recomputed."""
        self._kv = kv
        self._images = images
        self._limits = limits
        self._gates = gates
        self._waiting, self._running, self._stats = collections.waiting, collections.running, collections.stats
        self._changes = changes
        self._prefers_swap = prefers_swap
        self._hashing = PromptHashing(kv, limits)
        self._quoted: tuple[Request, Quote] | None = None
        """First waiting request and its quote, until this pass changes the pool."""
        self._rejected: Request | None = None
        """Waiting request that did not fit into `_rejected_room` blocks."""
        self._rejected_room = 0
        self.holds_new = False
        """True while the engine is paused (quire/engine/sleep.py): only preempted requests start."""

    def forget_rejection(self) -> None:
        """Let the next pass try again the request that did not fit (a pass skips it until something changes): it needs
        less now, or more is free."""
        self._rejected = None

    def forget(self, request: Request) -> None:
        self._gates.forget(request)

    def plan_preemption(self, now: float) -> PreemptionPlan:
        """Plan which running requests the first waiting one, or one behind deferred ones, preempts (preemption.py).
        Begins each pass."""
        self._quoted = None
        self._hashing.begin_pass(is_idle=not self._running.sequences)
        reserved = Reservations()
        request = self._first_ready(reserved, now)
        if request is None:
            return NO_PREEMPTION
        if not comes_before_running(request, self._running.sequences):
            return NO_PREEMPTION
        if self._hashing.defer(request):
            return NO_PREEMPTION
        needs = quote(request, self._kv, self._limits.max_chunk, reserved.num_blocks)
        self._quoted = request, needs
        if self._gates.check((GateStage.LOOK_UP,), request, needs, now) is not None:
            return NO_PREEMPTION
        preemption = plan_preemption(request, needs, self._running, self._kv, self._limits, reserved)
        if preemption.victims and self._gates.defer((GateStage.BEGIN,), request, needs, now):
            return NO_PREEMPTION
        if preemption.victims:
            self._quoted = None  # they leave more room
        if preemption.num_tokens or preemption.victims:
            self._rejected = None  # it fits now
        return preemption

    def _first_ready(self, reserved: Reservations, now: float) -> Request | None:
        """First waiting request, if it may start, to preempt for. While background ones run, the first behind deferred
        live ones, whose needs are reserved."""
        first, running = self._waiting.first, self._running.sequences
        if first is None or not (self._is_held(first) or is_deferred(first, now)):
            return first
        if not running or not running[-1].request.is_background:
            return None
        for request in self._waiting:
            if request.is_background or reserved.has_preempted:
                return None
            if self._is_held(request):
                continue
            if not is_deferred(request, now):
                return request
            reserved.reserve(request)
        return None

    def admit(self, builder: PlanBuilder, now: float) -> None:
        """Start waiting requests in order while token budget, request slots and blocks allow; stop at the first that
        does not fit. Later requests may start before a deferred one (gates.py)."""
        reserved = Reservations()
        started = []
        for request in self._waiting:
            if reserved.has_preempted or builder.budget <= 0:
                break
            if self._is_held(request):
                continue
            sequences = request.live_sequences
            if any(sequence.num_pending_tokens for sequence in sequences):
                break  # preempted with a sample in flight: the next update brings its token
            if is_deferred(request, now):
                reserved.reserve(request)
                continue
            if self._running.num_slots + reserved.num_slots + len(sequences) > self._limits.max_num_seqs:
                break
            room = self._kv.pool.num_allocatable - reserved.num_blocks
            if request is self._rejected and room <= self._rejected_room and self._running.sequences:
                break  # nothing was freed since: skip the prefix look-up
            if self._hashing.defer(request):
                reserved.reserve(request)
                continue
            needs = self._quote(request, builder, reserved)
            if self._gates.defer((GateStage.LOOK_UP, GateStage.BEGIN), request, needs, now):
                reserved.reserve(request)
                continue
            num_tokens = min(needs.num_new_tokens, self._limits.max_chunk, builder.budget)
            if num_tokens < needs.num_new_tokens and (reserved or self._limits.whole_prompts):
                break
            if not needs.is_resumed and self._images.awaits_budget(request, needs.num_cached_tokens, num_tokens):
                break
            if not self._has_room(request, needs):
                break
            if self._gates.defer((GateStage.START,), request, needs, now):
                reserved.reserve(request)
                continue
            started.append(request)
            self._gates.forget(request)
            if needs.is_resumed:
                self._resume(builder, request)
            else:
                num_cached = needs.num_cached_tokens
                end = self._images.limit(request, num_cached, num_cached + num_tokens)
                self._start(builder, request, num_cached, end - num_cached, now)
        for request in started:
            self._waiting.remove(request)
        self._stats.num_deferred = reserved.num_requests

    def preempt(self, builder: PlanBuilder, request: Request) -> None:
        for sequence in request.live_sequences:
            if sequence.blocks is not None:
                self._changes.release_slot(sequence)
        copies = release_blocks(request, self._kv, self._prefers_swap)
        builder.swap_out += copies or []
        self._stats.swap_preemptions_total += copies is not None
        self._running.leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._stats.preemptions_total += 1
        self._waiting.put_back(request)

    def _is_held(self, request: Request) -> bool:
        return self.holds_new and request.status is not RequestStatus.PREEMPTED

    def _quote(self, request: Request, builder: PlanBuilder, reserved: Reservations) -> Quote:
        quoted, self._quoted = self._quoted, None
        if quoted is not None and quoted[0] is request and not (builder.grown or builder.forked):
            return quoted[1]
        return quote(request, self._kv, self._limits.max_chunk, reserved.num_blocks)

    def _has_room(self, request: Request, needs: Quote) -> bool:
        fits = has_room(needs.num_blocks, needs.room, self._kv, is_alone=not self._running.sequences)
        self._rejected, self._rejected_room = (None, 0) if fits else (request, needs.room)
        return fits

    def _start(self, builder: PlanBuilder, request: Request, num_cached: int, num_tokens: int, now: float) -> None:
        """Move a request to the running set, and its first sequence into the plan: `num_cached` tokens come from the
        prefix cache, the next `num_tokens` from this step."""
        leader = request.live_sequences[0]
        if request.beam_search is not None:
            request.beam_search.forget_candidates()
        self._running.enter(request, [leader])
        leader.blocks = self._kv.allocate_prefix(leader.chain, num_cached, leader.token_ids)
        leader.blocks.is_background = request.is_background
        leader.num_computed_tokens = num_cached
        leader.first_step_id = builder.plan.step_id
        self._count_start(request, num_cached, now)
        self._grow_new(builder, leader, num_tokens)

    def _count_start(self, request: Request, num_cached: int, now: float) -> None:
        stats = self._stats
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            num_cached = min(num_cached, request.num_prompt_tokens)  # of a resumed request it may be more
            request.num_cached_tokens = num_cached
            stats.prompt_tokens_total += request.num_prompt_tokens
            if not request.bypass_prefix_cache and self._kv.enable_prefix_caching:
                stats.prefix_cache_queries_total += request.num_prompt_tokens
                stats.prefix_cache_hits_total += num_cached
        else:
            stats.recomputed_tokens_total += max(0, request.num_lost_tokens - num_cached)
            request.num_lost_tokens = 0

    def _resume(self, builder: PlanBuilder, request: Request) -> None:
        """Move a swapped request back to the running set, whose blocks the workers copy back during this step."""
        sequences, copies = swap_in(request, self._kv)
        builder.swap_in += copies
        for sequence in sequences:
            builder.add_row(sequence)
            assert sequence.blocks is not None
            builder.resumed.append((sequence, sequence.blocks, sequence.num_computed_tokens))
        self._running.enter(request, sequences)

    def _grow_new(self, builder: PlanBuilder, leader: Sequence, num_tokens: int) -> None:
        assert leader.blocks is not None
        start = leader.num_computed_tokens
        allocation = self._kv.allocate_slots(leader.blocks, start, start + num_tokens)
        assert allocation is not None, "admitted without room"
        builder.plan.block_copies += allocation.copies  # the last block of a registered prefix
        builder.add_row(leader)
        builder.schedule(leader, num_tokens)
        if leader.num_computed_tokens == leader.request.fork_position:
            builder.fork(leader, self._kv)


class PromptHashing:
    """Hashes waiting prompts for the prefix cache, a bounded number of tokens per pass."""

    def __init__(self, kv: KVCacheManager, limits: Limits) -> None:
        self._kv = kv
        self._max_chunk = limits.max_chunk
        self.piece_tokens, self.short_tokens = PIECE_TOKENS, SHORT_TOKENS
        self._num_left: float = 0

    def begin_pass(self, *, is_idle: bool) -> None:
        """Renew the bound at a pass' start. is_idle: no sequence runs, so hashing is not bounded."""
        self._num_left = math.inf if is_idle else self.piece_tokens

    def defer(self, request: Request) -> bool:
        """Hash the prompt's blocks within this pass's bound. If some are left, defer the request to the next pass and
        return True."""
        leader = request.live_sequences[0]
        if leader.chain is None or request.swapped_blocks:
            return False
        size = self._kv.hash_block_size
        num_blocks = (num_shared_tokens(request) - 1) // size
        num_tokens = (num_blocks - leader.chain.num_blocks) * size
        if num_tokens <= self.short_tokens:
            return False  # the quote does it
        num_hashed = int(min(num_tokens, self._num_left)) // size
        leader.chain.extend(leader.token_ids, leader.chain.num_blocks + num_hashed)
        self._num_left -= num_hashed * size
        if leader.chain.num_blocks == num_blocks:
            return False
        num_needed = blocks_in_use(request, self._kv, self._max_chunk)
        request.deferral = Deferral(HASHING_PROMPT, num_needed, lambda: False)
        return True
