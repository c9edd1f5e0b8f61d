"""Scheduler: chooses the tokens of the next step (continuous batching over a paged KV cache). There are no prefill and
decode phases: a step schedules a sequence's tokens up to the target (`Sequence`)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import count, repeat

from quire.config.adapters import NO_ADAPTERS, AdaptersConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.vision import EncoderCosts
from quire.decoding.drafts import (
    NO_DRAFTER,
    NO_DRAFTS,
    Drafter,
    count_drafts,
    propose_drafts,
    take_accepted,
    take_back_rejected,
    take_back_token,
)
from quire.decoding.masks import Constraint, Matcher
from quire.decoding.parallel import create_sequences
from quire.decoding.sequence import PENDING_PREFIX, Request, RequestStatus
from quire.errors import UserError
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.stats import EngineStats, Load
from quire.outputs import SequenceUpdate
from quire.request import EngineRequest, FinishReason
from quire.scheduler.adapters import AdapterGate, AdapterSlots
from quire.scheduler.admission import Limits, PrefixRegistration, reject_impossible
from quire.scheduler.admitter import Admitter
from quire.scheduler.encoding import ImageEncodings, ImageGate
from quire.scheduler.ends import Ends
from quire.scheduler.gates import Gate, Gates, default_gates
from quire.scheduler.in_flight import InFlight, Sampled
from quire.scheduler.invariants import check_requests
from quire.scheduler.kv_usage import count_copies, describe_kv, first_stats
from quire.scheduler.matching import Matching
from quire.scheduler.plan_builder import PlanBuilder, PlanChanges
from quire.scheduler.preemption import NO_PREEMPTION, PreemptionCosts, PreemptionPlan, choice
from quire.scheduler.queue import Deadlines, RequestQueue
from quire.scheduler.reporting import attach_prompt_logprobs, report_times_early
from quire.scheduler.running import Collections, RunningSet
from quire.scheduler.snapshot import KVSnapshot, take_snapshot
from quire.step import SamplingInputs, StepPlan, StepResult


class Scheduler:
    """Serves requests in order (`Request.order_key`) under a token budget and a limit of sequences; preempts the last
    in order."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        preemption_costs: PreemptionCosts | None = None,
        gates: list[Gate] | None = None,
        drafter: Drafter = NO_DRAFTER,
        adapters: AdaptersConfig = NO_ADAPTERS,
        encoder: EncoderCosts | None = None,
    ) -> None:
        """preemption_costs: only needed by the preemption mode "auto". gates: replace `default_gates`. drafter: for
        workers that verify drafts. encoder: costs of the image tower; None: no images."""
        self.kv = kv
        self._max_chunk = min(config.max_prefill_chunk or 2**62, config.max_num_batched_tokens)
        self._limits = Limits(config.max_num_seqs, config.max_num_batched_tokens, self._max_chunk, config.whole_prompts)
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue(config.priority_seconds)
        self._running, self._deadlines = RunningSet(), Deadlines()
        self._registration = PrefixRegistration(kv, self._max_chunk)
        self._drafter, self._num_stages = drafter, config.num_stages
        self.can_discard = not drafter.max_drafts and len(kv.token_groups) == kv.num_groups
        """True if the workers can compute a sequence's last token again: not with states, nor with drafts, whose number
        only they know."""
        self._has_found_drafts = False
        """True if the workers had drafts in the last result."""
        self._updated = 0.0
        self._in_flight: dict[int, InFlight] = {}
        self._seq_ids, self._step_ids = count(), count()
        self.matching = Matching()
        self._stats = first_stats(kv)
        self._adapters, self._images = AdapterSlots(self._running, adapters), ImageEncodings(encoder)
        own_gates: list[Gate] = [AdapterGate(self._adapters), ImageGate(self._images)]
        self._gates = Gates([*(default_gates(kv) if gates is None else gates), *own_gates])
        self._changes = PlanChanges()
        collections = Collections(self._requests, self._waiting, self._running, self._deadlines, self._stats)
        prefers_swap = choice(config.preemption_mode, preemption_costs)
        self._admitter = Admitter(kv, self._limits, self._gates, collections, self._changes, prefers_swap, self._images)
        self._ends = Ends(kv, self._changes, collections, self._registration, self._admitter)

    # -- requests ---------------------------------------------------------------------------------------------------

    def add_request(self, source: EngineRequest, now: float, constraint: Constraint | None = None) -> None:
        if source.request_id in self._requests:
            raise UserError(f"request id {source.request_id!r} is in use", param="request_id")
        request = self._waiting.receive(source, now, constraint)
        if self._num_stages > 1:
            request.max_pending_tokens = 0  # a token must be known to be sent to the first stage
        reject_impossible(request, self.kv, self._registration.num_usable, self._limits)
        if request.register_prefix:
            self._registration.reserve(request, self._requests.values())
        create_sequences(request, source, self._seq_ids, self.kv)
        self.matching.begin(request)
        self._requests[request.request_id] = request
        if any(sequence.num_output_tokens for sequence in request.sequences):  # it goes on as one that was preempted
            request.status = RequestStatus.PREEMPTED
            self._waiting.put_back(request)
        else:
            self._waiting.push(request)
        self._deadlines.watch(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        request = self._requests.get(request_id)
        if request is None or (request.beam_search is not None and index is not None):
            return
        self._ends.end(request, [s for s in request.live_sequences if index in (None, s.index)], FinishReason.ABORT)

    def abort_all(self, now: float) -> list[SequenceUpdate]:
        ended = [each for each in self._requests.values() if not each.register_prefix]
        return self._ends.end_requests(ended, FinishReason.ABORT, now)

    def hold_new(self, is_held: bool) -> None:
        self._admitter.holds_new = self._adapters.holds_new = is_held

    def expire(self, now: float) -> list[SequenceUpdate]:
        expired = self._deadlines.expired(now)
        return self._ends.end_expired(expired, now) if expired else []

    def unregister_prefix(self, name: str) -> int:
        if not self.kv.is_registered(name):
            raise UserError(f"no prefix {name!r} is registered", param="prefix_id")
        self._admitter.forget_rejection()
        return self.kv.unregister_prefix(name)

    def longest_sequence(self, limit: int) -> int:
        return self._registration.longest_sequence(limit)

    def most_blocks(self, num_tokens: int) -> int:
        return self.kv.most_blocks(num_tokens, self._max_chunk)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    # -- one step ---------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        builder = PlanBuilder(next(self._step_ids), self._limits.max_num_tokens)
        self.kv.transfer_blocks.begin_pass()
        if self._waiting.first is None:
            self._schedule_running(builder, NO_PREEMPTION)
        else:
            preemption = self._admitter.plan_preemption(now)
            for victim in dict.fromkeys((*self._adapters.take_victims(), *preemption.victims)):
                self._admitter.preempt(builder, victim)
            if not self._schedule_running(builder, preemption):
                self._admitter.admit(builder, now)
        return self._finish_plan(builder)

    def schedule_transfers(self, *, awaits_report: bool = False) -> StepPlan | None:
        builder = PlanBuilder(next(self._step_ids), self._limits.max_num_tokens)
        self.kv.transfer_blocks.begin_pass()
        return self._finish_plan(builder, awaits_report=awaits_report)

    def forget_rows(self, *, adapters: bool) -> None:
        assert not self.has_requests, "rows of live requests"
        self._images.forget_workers()
        if adapters:
            self._adapters.forget_workers()
        self._changes.released = []

    def _finish_plan(self, builder: PlanBuilder, *, awaits_report: bool = False) -> StepPlan | None:
        if self._images.are_any:
            builder.plan.images = self._images.orders(builder.budget, is_idle=builder.is_idle and not self._in_flight)
        is_idle = builder.is_idle
        may_wait = is_idle and not self._in_flight
        builder.order_transfers(self.kv, may_wait=may_wait, awaits_report=awaits_report)
        if self._adapters.are_any:
            orders = self._adapters.take_orders(may_wait=may_wait and builder.plan.transfers is None)
            builder.plan.adapters = orders
        if is_idle and builder.plan.transfers is None and builder.plan.adapters is None:
            # The slots of finished sequences stay taken until the next plan, which nothing needs before.
            return None
        for parent, children in builder.forked:  # they run from the next step on
            self._running.insert_forked(parent, children)
        plan = builder.build(self._changes)
        self._in_flight[plan.step_id] = builder.in_flight()
        self._stats.steps_total += not is_idle
        self._stats.scheduled_tokens_total += self._limits.max_num_tokens - builder.budget
        if plan.block_copies or plan.transfers is not None:
            count_copies(self._stats, plan, builder, self.kv.block_bytes)
        return plan

    def awaits_masks(self, plan: StepPlan) -> bool:
        return self._in_flight[plan.step_id].awaits_masks

    def sampling_inputs(self, plan: StepPlan) -> SamplingInputs:
        """Masks for a plan at the workers; they drop samples whose mask is missing."""
        in_flight = self._in_flight[plan.step_id]
        inputs, failed = in_flight.sampling_inputs()
        for sequence in in_flight.discarded:
            self.matching.note_late(sequence)
            self._changes.trimmed |= take_back_token(sequence, self.kv)
        for sequence, error in failed:
            self._ends.end_unmatched(sequence, error.message)
        return inputs

    def update(self, result: StepResult, now: float, *, may_go_ahead: bool = False) -> list[SequenceUpdate]:
        """Append a result's tokens, end sequences, commit full blocks, free; returns the updates."""
        in_flight = self._in_flight.pop(result.step_id)
        seconds, self._updated = now - self._updated, now
        plan, samples, ends = in_flight.plan, in_flight.samples, self._ends
        assert len(samples) == len(result.token_ids), "a result without a sample, or the other way round"
        updates = ends.end_nonfinite(in_flight, result.nonfinite, now) if result.nonfinite else []
        in_flight.commit(self.kv)
        for index, reason in result.failed.items():
            ends.fail(samples[index], reason)
        if result.transfers is not None:
            self.kv.connector.update(result.transfers)
        self._stats.encoder_seconds_total += result.encoder_seconds
        if result.adapters:
            self._adapters.update(result.adapters, self._requests.values())
        logprobs = map(result.logprobs.get, count()) if result.logprobs else repeat(None)
        sampled: Iterable[Sampled] = zip(samples, result.token_ids, logprobs, strict=False)  # logprobs end never
        # Samples other than tokens leave the others to `_take_tokens`; most steps have none.
        if plan.num_drafts or not all(result.token_ids):
            self._changes.trimmed |= take_back_rejected(plan, samples, result.token_ids, self.kv)
            if result.num_drafts:
                count_drafts(self._stats, plan, result)
        if result.found_drafts or self._has_found_drafts:
            self._has_found_drafts = bool(result.found_drafts)
            self._drafter.note_step(samples, plan, result, seconds)
        if result.pooled:
            updates += ends.end_pooled(samples, result.pooled, now)
        if result.candidates:
            updates += ends.update_beams(samples, result, now)
            sampled = [entry for entry in sampled if entry[0].request.beam_search is None]
        if plan.masked_samples:
            sampled = self.matching.take_samples(sampled, in_flight, ends, self.kv, may_go_ahead and self.can_discard)
        self._take_tokens(sampled, updates, now, has_drafts=bool(plan.num_drafts))
        if result.prompt_logprobs:
            attach_prompt_logprobs(result.prompt_logprobs, in_flight.sequences, updates)
        if ends.unmatched:
            updates += ends.report_unmatched(now)
        return updates

    def _take_tokens(
        self, sampled: Iterable[Sampled], updates: list[SequenceUpdate], now: float, *, has_drafts: bool
    ) -> None:
        """Append sampled tokens to their sequences, and end complete ones. has_drafts: a sequence may have several new
        tokens (accepted drafts)."""
        any_finished = bool(updates)
        num_tokens = sum([len(update.new_token_ids) for update in updates]) - len(updates) if updates else 0
        for sequence, new_ids, token_logprobs in sampled:
            sequence.num_pending_tokens -= 1
            if sequence.finish_reason is not None or not new_ids:
                continue  # it has ended, or the workers have discarded the sample
            request, token_ids = sequence.request, sequence.token_ids
            if request.register_prefix and sequence.blocks is None:
                continue  # preempted meanwhile: the prefix has no blocks to register and is computed again
            update = SequenceUpdate(request.request_id, sequence.index, new_ids)
            if has_drafts:
                update.new_token_ids = new_ids = take_accepted(sequence, new_ids, self.kv)
                update.drafts, sequence.draft_step = sequence.draft_step, b""
                num_tokens += len(new_ids) - 1
            else:
                token_ids += new_ids
            if token_logprobs:
                update.logprobs = token_logprobs[: len(new_ids)]
            num_known = len(token_ids)
            if num_known >= sequence.max_total_tokens or new_ids[-1] in request.end_token_ids:
                any_finished = True
                self._ends.finish_in_time(sequence, update, now)
            elif num_known <= sequence.report_times_until:
                report_times_early(update, sequence, num_known, now)
            updates.append(update)
        self._stats.generation_tokens_total += len(updates) + num_tokens  # one token an update, but for those above
        if any_finished:
            self._running.drop_finished()

    @property
    def awaits_answers(self) -> bool:
        matching = self.matching
        return bool(matching.asked or matching.starting or matching.late or self._changes.beam_reorder.undecided)

    @property
    def awaits_others(self) -> bool:
        matching = self.matching
        if matching.starting or matching.late or self._changes.beam_reorder.undecided or self._adapters.refused:
            return True
        return bool(matching.asked) and not matching.all_go_ahead()

    def awaited(self) -> list[Matcher]:
        beams = self._changes.beam_reorder.awaited
        return self.matching.awaited() + [matcher for matcher in beams if not matcher.is_slow]

    def settle(self, now: float) -> tuple[list[SequenceUpdate], list[tuple[str, UserError]]]:
        """Append tokens that a grammar forces, end finished sequences, and end requests that cannot start under their
        constraints."""
        updates = self._ends.settle(self.matching, now)
        refused: list[tuple[Request, UserError]] = []
        if self.matching.starting or self._adapters.refused:
            refused = self.matching.take_refused() + self._adapters.take_refused()
        for request, _ in refused:
            self._ends.end(request, request.live_sequences, FinishReason.ERROR)
        if updates:
            self._running.drop_finished()
        if self._ends.unmatched:
            updates += self._ends.report_unmatched(now)
        return updates, [(request.request_id, error) for request, error in refused]

    # -- parts of a step --------------------------------------------------------------------------------------------

    def _schedule_running(self, builder: PlanBuilder, preemption: PreemptionPlan) -> bool:
        """Schedule tokens for the running sequences in order; True after a preemption. Sequences behind the waiting
        request that `preemption` is for leave it its tokens."""
        running = self._running.sequences
        index = builder.place_steady(running, 0)
        if index == len(running):  # in most steps
            return False
        num_reserved = preemption.num_tokens
        waiting_key = preemption.order_key if num_reserved else None
        kv, max_chunk, drafter, placed, preempted = self.kv, self._max_chunk, self._drafter, builder.sequences, False
        while index < len(running):
            sequence = running[index]
            if sequence.num_computed_tokens < sequence.fast_path_until:
                index = builder.place_steady(running, index)
                continue
            index += 1  # a preemption removes only entries behind this index
            request = sequence.request
            if len(placed) * self._num_stages >= len(running) and placed[-1].request is not request:
                break  # the rest is for the other stages' plans
            num_pending = sequence.num_pending_tokens
            known = len(sequence.token_ids) + num_pending
            start = sequence.num_computed_tokens
            num_tokens = known - start
            if num_tokens <= 0 or (sequence.awaits_matcher and not sequence.goes_ahead):
                continue
            if num_pending and (known >= sequence.max_total_tokens or num_pending > request.max_pending_tokens):
                continue
            if num_pending and sequence.draft_token_ids:
                continue  # there are masks behind drafts when all tokens before them are known
            if num_tokens > 1:
                # Each later sequence keeps at least one token of the budget, so a long prompt starves none.
                num_free = builder.budget - (len(running) - index)
                if waiting_key is not None and waiting_key < sequence.request.order_key:
                    num_free = max(1, num_free - num_reserved)
                num_tokens = min(num_tokens, max_chunk, num_free)
                if request.fork_position is not None:
                    num_tokens = min(num_tokens, request.fork_position - start)
            if start < request.images_end:
                num_tokens = self._images.limit(request, start, start + num_tokens) - start
                if not num_tokens:
                    continue  # an image is to be encoded first
            blocks = sequence.blocks
            assert blocks is not None, "a running sequence has blocks"
            drafts, end = NO_DRAFTS, start + num_tokens
            has_drafts = sequence.num_found_drafts or drafter.asks_always
            if has_drafts and num_tokens == 1 and end == known and drafter.max_drafts:
                num_free = builder.budget - (len(running) - index) - num_reserved
                drafts = propose_drafts(drafter, sequence, num_free, max_chunk, len(running))
                end += drafts.num_tokens
            if end > blocks.capacity or blocks.tail_shared:
                least_start = start - sequence.num_pending_drafts
                allocation = kv.allocate_slots(blocks, least_start, end)
                if allocation is None and drafts.num_tokens:
                    drafts, end = NO_DRAFTS, start + num_tokens
                    allocation = kv.allocate_slots(blocks, least_start, end)
                while allocation is None:
                    victim = running[-1].request
                    preempted = True
                    if victim is request:
                        builder.undo(request, kv)
                    self._admitter.preempt(builder, victim)
                    if victim is request:
                        return True
                    allocation = kv.allocate_slots(blocks, least_start, end)
                builder.grow(sequence, allocation)
            builder.place(sequence, start, num_tokens, known)
            if sequence.num_unsent_tokens:
                builder.append_forced(sequence)
            if start + num_tokens == request.fork_position:
                builder.fork(sequence, kv)
            if drafts.num_tokens or sequence.num_pending_drafts:
                builder.place_drafts(drafts)
            elif drafter.asks_always:
                continue
            elif start + num_tokens == known and request.max_pending_tokens > 1 and not blocks.tail_shared:
                sequence.fast_path_until = min(blocks.capacity, sequence.max_total_tokens - 1)
        return preempted

    # -- inspection -------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        stats = self._stats
        stats.prefix_cache_waits_total = self._gates.num_deferrals.get(PENDING_PREFIX, 0)
        describe_kv(stats, self.kv, self._running.sequences, self._in_flight.values())
        self._waiting.report_stats(stats)
        self._adapters.report_stats(stats, self._waiting)
        self._images.report_stats(stats)
        stats.num_running = len(self._requests) - stats.num_waiting
        stats.num_running_in_background = self._running.num_in_background
        return copy.copy(stats)

    def current_load(self) -> Load:
        num_waiting, preemptions = len(self._waiting), self._stats.preemptions_total
        return Load(len(self._requests) - num_waiting, num_waiting, self.kv.pool.num_used, preemptions)

    def snapshot(self, now: float) -> KVSnapshot:
        """State of every block and every live request, for the live view. O(blocks + table entries)."""
        running = dict.fromkeys(s.request for s in self._running.sequences)
        return take_snapshot(self.kv, running, self._waiting, now)

    def check(self) -> None:
        self.kv.check()
        self._changes.beam_reorder.check(self._running.sequences)
        assert self._running.num_slots <= self._limits.max_num_seqs
        check_requests(self._requests.values(), self._waiting, self._running, self._deadlines, self.kv)
