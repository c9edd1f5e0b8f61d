"""Which tokens are computed next: continuous batching over a paged KV cache.

There is no prefill and no decode phase. A sequence has `num_computed_tokens` and a target, the tokens known plus
those that plans in flight will sample; a step hands out tokens until the first meets the second. Chunked prefill,
prefix hits and recomputation after a preemption are then the same thing, and so is planning ahead: a plan may be made
while an earlier one runs, because tokens not known yet are counted.
"""

from __future__ import annotations

import bisect
import copy
import itertools

from quire.config.scheduler import SchedulerConfig
from quire.decoding.parallel import create_sequences, fork_at_prompt_end
from quire.errors import UserError
from quire.kv_cache.manager import KVCacheManager
from quire.outputs import RequestTiming, SequenceUpdate
from quire.request import EngineRequest, FinishReason, Request, RequestStatus, Sequence
from quire.scheduler.accounts import InFlight, num_reserved_slots, num_wasted_slots
from quire.scheduler.admission import blocks_to_start, has_room, refuse_impossible
from quire.scheduler.plan_builder import PlanBuilder
from quire.scheduler.queue import RequestQueue
from quire.scheduler.sharing import PassedOver
from quire.scheduler.stop import finish_reason
from quire.stats import EngineStats
from quire.step import NewSequence, StepPlan, StepResult


class Scheduler:
    """First come, first served, under a token budget and a limit of sequences; preempts the latest arrival.

    `schedule` and `update` alternate freely as long as results come back in plan order.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.kv = kv
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_num_seqs = config.max_num_seqs
        self._max_chunk = min(config.max_prefill_chunk or config.max_num_batched_tokens, config.max_num_batched_tokens)
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue()
        self._running: list[Sequence] = []
        """Sequences that have a row, by arrival; those of one request side by side."""
        self._num_unforked = 0
        """Sequences of running requests that wait for their prompt: they have a claim, not yet a row."""
        self._released: list[int] = []
        self._refused: Request | None = None
        """The waiting request that did not fit ..."""
        self._refused_room = 0
        """... into so many blocks."""
        self._in_flight: dict[int, InFlight] = {}
        self._seq_ids = itertools.count()
        self._step_ids = itertools.count()
        self._stats = EngineStats(block_size=kv.block_size, block_bytes=kv.block_bytes, num_blocks=kv.pool.num_usable)

    # -- requests come and go ---------------------------------------------------------------------------------------

    def add(self, source: EngineRequest, now: float) -> None:
        """Queue a request. Raises PromptTooLongError when it could never finish, UserError for a duplicate id."""
        if source.request_id in self._requests:
            raise UserError(f"request id {source.request_id!r} is in use", param="request_id")
        request = Request(source, now)
        refuse_impossible(request, self.kv, self._max_num_seqs, self._max_chunk)
        request.sequences = create_sequences(request, source, self._seq_ids)
        if not request.bypass_prefix_cache:
            for sequence in request.sequences:
                sequence.chain = self.kv.new_chain(request.cache_salt)
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences, now. Its blocks are free at once. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return
        aborted = [s for s in request.live_sequences if index is None or s.index == index]
        self._refused = None  # with a sequence fewer it may fit
        lost_leader = bool(request.unforked) and any(s.blocks is not None for s in aborted)
        for sequence in aborted:
            if sequence in request.unforked:
                request.unforked.remove(sequence)
                self._num_unforked -= 1
            self._finish(sequence, FinishReason.ABORT)
        if lost_leader and request.unforked:
            # The others were waiting for its prompt: start the request again with another leader.
            self._num_unforked -= len(request.unforked)
            request.unforked = []
            request.status = RequestStatus.PREEMPTED
            self._waiting.put_back(request)
        self._running = [s for s in self._running if s.finish_reason is None]

    def longest_sequence(self, limit: int) -> int:
        """The longest sequence, up to `limit` tokens, that the whole pool can hold."""
        usable = self.kv.pool.num_usable
        lengths = range(1, limit + 1)
        return bisect.bisect_right(lengths, usable, key=lambda n: self.kv.most_blocks(n, self._max_chunk))

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    # -- one step ---------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, or return None when nothing can be computed now (idle, or waiting for results)."""
        builder = PlanBuilder(next(self._step_ids), self._max_num_batched_tokens)
        preempted = self._schedule_running(builder)
        if not preempted:
            self._admit_waiting(builder, now)
        if not builder.sequences:
            # Rows of finished sequences stay until the next plan: nobody needs them meanwhile.
            return None
        self._insert_forked(builder)
        plan = builder.build(self._released)
        self._released = []
        self._in_flight[plan.step_id] = InFlight(plan, builder.sequences, builder.samples, builder.forked)
        self._stats.steps_total += 1
        self._stats.scheduled_tokens_total += self._max_num_batched_tokens - builder.budget
        self._stats.copied_blocks_total += len(plan.block_copies)
        return plan

    def update(self, result: StepResult, now: float) -> list[SequenceUpdate]:
        """Take the result of the oldest plan in flight: append tokens, stop, commit full blocks, free."""
        plan, sequences, samples, _ = self._in_flight.pop(result.step_id)
        self._commit(plan, sequences)
        updates = []
        any_finished = False
        for position, (sequence, token_id) in enumerate(zip(samples, result.token_ids, strict=True)):
            sequence.num_pending_tokens -= 1
            if sequence.finish_reason is not None:
                continue
            sequence.token_ids.append(token_id)
            update = SequenceUpdate(sequence.request.request_id, sequence.index, [token_id])
            if result.logprobs and position in result.logprobs:
                update.logprobs = [result.logprobs[position]]
            finish = finish_reason(sequence, token_id)
            if finish is not None:
                any_finished = True
                update.finish_reason, update.stop_reason = finish
                self._finish(sequence, finish[0])
            # A stop string may end it at any token, which only the front end sees.
            if finish is not None or sequence.num_output_tokens == 1 or sequence.request.params.stop:
                self._describe(update, sequence, now)
            updates.append(update)
        self._stats.generation_tokens_total += len(updates)
        if result.prompt_logprobs:
            self._attach_prompt_logprobs(result, sequences, updates)
        if any_finished:
            self._running = [s for s in self._running if s.finish_reason is None]
        return updates

    # -- parts of a step --------------------------------------------------------------------------------------------

    def _schedule_running(self, builder: PlanBuilder) -> bool:
        """Hand tokens to running sequences, oldest first; preempt the latest arrivals if blocks run out."""
        running, kv, max_chunk = self._running, self.kv, self._max_chunk
        preempted = False
        request, mark = None, builder.mark()
        index = 0
        while index < len(running):
            sequence = running[index]
            index += 1
            if sequence.request is not request:
                request, mark = sequence.request, builder.mark()
            known = len(sequence.token_ids) + sequence.num_pending_tokens
            start = sequence.num_computed_tokens
            num_tokens = known - start
            if num_tokens <= 0 or (sequence.num_pending_tokens and known >= sequence.max_total_tokens):
                continue
            if num_tokens > 1:
                # Everybody behind keeps at least one token of the budget, so a long prompt starves nobody.
                num_tokens = min(num_tokens, max_chunk, builder.budget - (len(running) - index))
                if request.unforked:
                    num_tokens = min(num_tokens, request.num_prompt_tokens - start)
            blocks = sequence.blocks
            assert blocks is not None, "a running sequence has blocks"
            if start + num_tokens > blocks.capacity or blocks.tail_shared:
                growth = kv.append(blocks, start, start + num_tokens)
                while growth is None:
                    victim = running[-1].request
                    preempted = True
                    if victim is request:
                        builder.rollback(mark)
                    self._preempt(victim)
                    if victim is request:
                        return True
                    growth = kv.append(blocks, start, start + num_tokens)
                builder.grow(sequence, growth)
            builder.schedule(sequence, num_tokens)
            if request.unforked and sequence.num_computed_tokens == request.num_prompt_tokens:
                self._fork(builder, sequence)
        return preempted

    def _admit_waiting(self, builder: PlanBuilder, now: float) -> None:
        """Start waiting requests in order while budget, rows and blocks allow; the first that does not fit waits.

        One whose prefix is being computed waits too, but others may pass it (quire/scheduler/sharing.py).
        """
        passed = PassedOver(self.kv)
        started = []
        for request in self._waiting:
            sequences = request.live_sequences
            rows = len(self._running) + self._num_unforked + passed.num_rows + len(sequences)
            if builder.budget <= 0 or rows > self._max_num_seqs:
                break
            if any(sequence.num_pending_tokens for sequence in sequences):
                break  # preempted with a sample in flight: its value comes with the next update
            if passed.still(request):
                continue
            room = self.kv.pool.num_allocatable - passed.num_blocks
            if request is self._refused and room <= self._refused_room and self._running:
                break  # its prefix need not be looked up again in every step
            leader = sequences[0]
            end = request.num_prompt_tokens if len(sequences) > 1 else len(leader.token_ids)
            num_cached = self.kv.match_prefix(leader.chain, leader.token_ids, end - 1)
            num_blocks = blocks_to_start(request, self.kv, num_cached, self._max_chunk)
            if passed.begin(request, num_cached, end - 1, num_blocks):
                self._stats.prefix_cache_waits_total += 1
                continue
            num_tokens = min(end - num_cached, self._max_chunk, builder.budget)
            if passed and num_cached + num_tokens < end:
                break
            if not has_room(num_blocks, room, self.kv, is_alone=not self._running):
                self._refused, self._refused_room = request, room
                break
            self._refused = None
            started.append(request)
            self._start(builder, request, leader, num_cached, now)
            self._grow_new(builder, leader, num_tokens)
        for request in started:
            self._waiting.remove(request)

    def _start(self, builder: PlanBuilder, request: Request, leader: Sequence, num_cached: int, now: float) -> None:
        """Move a request from the queue to the running set; it owns the blocks of its prefix hit."""
        request.status = RequestStatus.RUNNING
        request.unforked = [s for s in request.live_sequences if s is not leader]
        self._num_unforked += len(request.unforked)
        # Nearly always the last place; a request whose leader was aborted comes back before later arrivals.
        bisect.insort(self._running, leader, key=lambda sequence: sequence.seq_id)
        leader.blocks = self.kv.begin(leader.chain, num_cached)
        leader.num_computed_tokens = num_cached
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.num_cached_tokens = num_cached
            self._stats.prompt_tokens_total += request.num_prompt_tokens
            if not request.bypass_prefix_cache and self.kv.enable_prefix_caching:
                self._stats.prefix_cache_queries_total += request.num_prompt_tokens
                self._stats.prefix_cache_hits_total += num_cached
        else:
            self._stats.recomputed_tokens_total += max(0, request.num_lost_tokens - num_cached)
            request.num_lost_tokens = 0

    def _grow_new(self, builder: PlanBuilder, leader: Sequence, num_tokens: int) -> None:
        """Schedule the first tokens of a sequence that has no row yet; admission made sure that they fit."""
        assert leader.blocks is not None
        start = leader.num_computed_tokens
        growth = self.kv.append(leader.blocks, start, start + num_tokens)
        assert growth is not None, "admitted without room"
        builder.new_sequences[leader.seq_id] = NewSequence(
            seq_id=leader.seq_id,
            token_ids=list(leader.token_ids),
            num_prompt_tokens=leader.request.num_prompt_tokens,
            block_ids=[list(table) for table in leader.blocks.tables],
            sampling=leader.sampling,
        )
        builder.schedule(leader, num_tokens)
        if leader.request.unforked and leader.num_computed_tokens == leader.request.num_prompt_tokens:
            self._fork(builder, leader)

    def _fork(self, builder: PlanBuilder, parent: Sequence) -> None:
        """Fork the siblings after this step's forward pass; those without a history sample from the parent's logits."""
        batch_index = len(builder.sequences) - 1
        children = []
        for child, fork in fork_at_prompt_end(parent, self.kv):
            builder.forks.append(fork)
            children.append(child)
            if fork.token_ids is None:
                builder.sample(child, batch_index)
        builder.forked.append((parent, children))

    def _insert_forked(self, builder: PlanBuilder) -> None:
        """Let this step's children run from the next step on, right behind their parent."""
        for parent, children in builder.forked:
            position = self._running.index(parent) + 1
            self._running[position:position] = children
            self._num_unforked -= len(children)

    def _preempt(self, request: Request) -> None:
        """Take back all blocks and rows of the request at the end of `_running`; it recomputes later."""
        num_shared = 0
        for sequence in request.live_sequences:
            if sequence.blocks is not None:
                request.num_lost_tokens += sequence.num_computed_tokens - num_shared
                num_shared = request.num_prompt_tokens  # which siblings do not compute again
                self.kv.free(sequence.blocks)
                sequence.blocks = None
                self._released.append(sequence.seq_id)
            sequence.num_computed_tokens = 0
        while self._running and self._running[-1].request is request:
            self._running.pop()
        self._num_unforked -= len(request.unforked)
        request.unforked = []
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._stats.preemptions_total += 1
        self._waiting.put_back(request)

    def _commit(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        """Offer blocks that this step filled to the prefix index. Earlier results came first: all tokens are known."""
        size = self.kv.block_size
        for sequence, start, count in zip(sequences, plan.start_positions, plan.num_tokens, strict=True):
            if sequence.blocks is not None and start // size != (start + count) // size:
                self.kv.commit(sequence.blocks, sequence.token_ids, start + count)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence; with the last one the request leaves. `_running` is filtered by the caller."""
        sequence.finish_reason = reason
        if sequence.blocks is not None:
            self.kv.free(sequence.blocks)
            sequence.blocks = None
            self._released.append(sequence.seq_id)
        request = sequence.request
        if not any(other.finish_reason is None for other in request.sequences):
            request.status = RequestStatus.FINISHED
            self._waiting.remove(request)
            del self._requests[request.request_id]
            self._stats.finished_requests_total += 1

    def _describe(self, update: SequenceUpdate, sequence: Sequence, now: float) -> None:
        request = sequence.request
        assert request.first_scheduled_time is not None
        update.num_cached_tokens = request.num_cached_tokens or 0
        update.timing = RequestTiming(request.arrival_time, request.first_scheduled_time, now, request.num_preemptions)

    def _attach_prompt_logprobs(
        self, result: StepResult, sequences: list[Sequence], updates: list[SequenceUpdate]
    ) -> None:
        """Report prompt logprobs once: recomputation yields them again, after a preemption or by the next leader."""
        by_id = {sequence.seq_id: sequence for sequence in sequences}
        for seq_id, logprobs in result.prompt_logprobs.items():
            sequence = by_id[seq_id]
            request = sequence.request
            if sequence.finish_reason is FinishReason.ABORT:
                continue
            known = max(request.num_prompt_logprobs, logprobs.start)
            fresh = logprobs.entries[known - logprobs.start :]
            if not fresh:
                continue
            logprobs.start, logprobs.entries = known, fresh
            request.num_prompt_logprobs = known + len(fresh)
            for update in updates:
                if update.request_id == request.request_id and update.index == sequence.index:
                    update.prompt_logprobs = logprobs
                    break
            else:
                updates.insert(0, SequenceUpdate(request.request_id, sequence.index, [], prompt_logprobs=logprobs))

    # -- looking in -------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of all counters and gauges."""
        stats, pool = self._stats, self.kv.pool
        stats.num_used_blocks = pool.num_used
        stats.num_cached_blocks = pool.num_evictable
        stats.num_shared_blocks = pool.num_shared
        stats.evictions_total = pool.num_evictions
        stats.num_logical_blocks = pool.num_references
        stats.num_wasted_slots = num_wasted_slots(self._running, self.kv.num_groups)
        stats.num_reserved_slots = num_reserved_slots(self._in_flight.values(), self.kv.block_size)
        stats.num_stored_tokens = pool.num_used * self.kv.block_size - stats.num_wasted_slots - stats.num_reserved_slots
        stats.num_waiting = len(self._waiting)
        stats.num_running = len(self._requests) - stats.num_waiting
        stats.num_preempted = self._waiting.num_returned
        return copy.copy(stats)

    def check(self) -> None:
        """Assert the invariants of the scheduler and of the KV cache. O(blocks + requests)."""
        self.kv.check()
        with_blocks = [s for r in self._requests.values() for s in r.live_sequences if s.blocks is not None]
        assert {s.seq_id for s in with_blocks} == {s.seq_id for s in self._running}, "rows and blocks disagree"
        assert self.kv.num_live_sequences == len(self._running), "the KV cache holds a sequence nobody runs"
        assert len(self._running) + self._num_unforked <= self._max_num_seqs
        assert self._num_unforked == sum(len(r.unforked) for r in self._requests.values())
        for request in self._waiting:
            assert all(s.blocks is None and s.num_computed_tokens == 0 for s in request.live_sequences)
        for sequence in self._running:
            known = len(sequence.token_ids) + sequence.num_pending_tokens
            assert 0 <= sequence.num_computed_tokens <= known <= sequence.max_total_tokens
            assert sequence.blocks is not None
            assert sequence.num_computed_tokens <= sequence.blocks.capacity
            waste = sequence.blocks.capacity - sequence.num_computed_tokens
            assert waste < self.kv.block_size, f"{waste} slots reserved and unused"
