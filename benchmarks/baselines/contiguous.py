"""What the paper's baselines have in common: contiguous regions, order of arrival, nothing shared, no preemption.

Requests come and go here, results are taken, memory is accounted for. Which tokens a step computes is the subclass's
(benchmarks/baselines/orca.py, faster_transformer.py). The plans are ordinary ones (quire/step.py): a region is a run
of consecutive blocks that a row gets all at once, and never more.

Parallel samples and beams have a region each. The prompt is computed once and copied to the others; a beam that forks
is copied whole, where a paged cache shares the blocks.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections import deque
from typing import NamedTuple

from benchmarks.baselines.regions import Regions, SlotAccounts
from benchmarks.baselines.reservation import Reservation
from quire.config.engine import EngineConfig
from quire.decoding.masks import Constraint, Matcher
from quire.decoding.parallel import create_sequences
from quire.decoding.sequence import Request, RequestStatus, Sequence
from quire.errors import PromptTooLongError, UserError
from quire.kv_cache.block_table import BlockTable
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.stats import EngineStats, Load
from quire.outputs import SequenceUpdate
from quire.request import EngineRequest, FinishReason
from quire.scheduler.beam_reorder import hypothesis_updates
from quire.scheduler.plan_builder import PlanBuilder, PlanChanges
from quire.scheduler.queue import Deadlines
from quire.scheduler.reporting import attach_prompt_logprobs, early_end, finish_reason, live_requests, report_times
from quire.scheduler.snapshot import KVSnapshot, RequestView, SequenceView
from quire.step import Candidates, SamplingInputs, SequenceFork, StepPlan, StepResult


class _Flight(NamedTuple):
    """Of a plan that was made, until its result comes: its batch, and the sequences that get its samples."""

    sequences: list[Sequence]
    samples: list[Sequence]


class _Copy(NamedTuple):
    """A child's region is to hold the first `num_tokens` tokens of a parent. source: the parent's table, as far as the
    workers know it when the child begins with it."""

    child: Sequence
    source: list[int]
    num_tokens: int


class _OwnRegions:
    """Stands for the KV cache while beams fork. Nothing is shared: `_follow` then gives each child its own region."""

    def fork(self, parent: BlockTable, num_tokens: int) -> BlockTable:
        return parent

    def free(self, blocks: BlockTable) -> None:
        """The place keeps its region for the next beam."""


class ContiguousScheduler(ABC):
    """Subclasses plan: `_plan` fills a builder, `_leave` decides when an ended sequence frees its row and region."""

    keeps_ended = False
    """Whether an ended sequence keeps its row and region while its batch goes on."""

    def __init__(self, config: EngineConfig, layout: KVCacheLayout, reservation: Reservation) -> None:
        self.kv = Regions(layout)
        self._reservation = reservation
        self._longest = min(config.model.max_model_len, self.kv.longest)
        self._max_num_batched_tokens = config.scheduler.max_num_batched_tokens
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._rows: list[Request] = []
        """Requests that have regions, in their order."""
        self._deadlines = Deadlines()
        self._changes = PlanChanges()
        self._copies: list[_Copy] = []
        """Of children that begin with their parent's table on the workers, due with the next plan."""
        self._untold: dict[Sequence, list[int]] = {}
        """Blocks at the ends of regions that the workers are to know of from the next plan on."""
        self._in_flight: dict[int, _Flight] = {}
        self._seq_ids = itertools.count()
        self._arrivals = itertools.count()
        self._step_ids = itertools.count()
        self._stats = EngineStats(
            block_size=layout.block_size, block_bytes=layout.block_bytes, num_blocks=layout.num_usable_blocks
        )

    # -- requests come and go ---------------------------------------------------------------------------------------

    def longest_sequence(self, limit: int) -> int:
        """The longest sequence, up to `limit` tokens, that one region can hold."""
        return min(limit, self.kv.longest)

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks of `num_tokens` side by side."""
        return -(-num_tokens // self._stats.block_size)

    def add_request(self, source: EngineRequest, now: float, constraint: Constraint | None = None) -> None:
        """Queue a request. Raises UserError (PromptTooLongError when it could never run), also for what these systems
        do not have: priorities, registered prefixes and constraints."""
        if constraint is not None:
            raise UserError("this system has no constraints on tokens", param="constraint")
        if source.request_id in self._requests:
            raise UserError(f"request id {source.request_id!r} is in use", param="request_id")
        if source.priority:
            raise UserError("the baseline serves in order of arrival: it knows no priority", param="priority")
        if source.register_prefix:
            raise UserError("the baseline has no prefix cache to pin in", param="prefix_id")
        request = Request(source, now, arrival_number=next(self._arrivals))
        self._reject_impossible(request)
        create_sequences(request, source, self._seq_ids)
        self._requests[request.request_id] = request
        self._waiting.append(request)
        self._deadlines.watch(request)

    def _reject_impossible(self, request: Request) -> None:
        n = request.params.num_sequences
        num_slots, num_fit = self._num_slots(request), min(self._most_rows, self._num_that_fit(request))
        if request.num_prompt_tokens > self._max_num_batched_tokens:
            raise PromptTooLongError(
                f"the prompt has {request.num_prompt_tokens} tokens, and the baseline computes prompts whole, in a "
                f"step of at most {self._max_num_batched_tokens}",
                param="prompt",
            )
        if num_slots > self._longest or n > num_fit:
            raise PromptTooLongError(
                f"the request reserves {n} x {num_slots} contiguous KV slots, and the pool has room for "
                f"{num_fit if num_slots <= self._longest else 0} such regions",
                param="max_tokens",
            )

    def _num_slots(self, request: Request) -> int:
        """What each of its sequences reserves: less than the policy says where no region is so large."""
        num_tokens = request.num_prompt_tokens + request.max_tokens
        reserved = self._reservation(request.num_prompt_tokens, request.max_tokens, self._longest)
        return max(num_tokens, min(reserved, self._longest))

    def _num_that_fit(self, request: Request) -> int:
        return self.kv.num_that_fit(self._num_slots(request))

    @property
    def _most_rows(self) -> int:
        """Sequences that may run at once."""
        return self._max_num_seqs

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences, now. Unknown ids are ignored, and so is the index of a hypothesis."""
        request = self._requests.get(request_id)
        if request is None or (request.beam_search is not None and index is not None):
            return
        self._end(request, [s for s in request.live_sequences if index in (None, s.index)], FinishReason.ABORT)

    def expire(self, now: float) -> list[SequenceUpdate]:
        """End the requests whose time (`timeout_s`) is over, running or waiting."""
        updates: list[SequenceUpdate] = []
        for request in self._deadlines.expired(now):
            self._stats.timed_out_requests_total += 1
            ended = request.live_sequences
            updates += early_end(request, FinishReason.TIMEOUT, now)
            self._end(request, ended, FinishReason.TIMEOUT)
        return updates

    def abort_all(self, now: float) -> list[SequenceUpdate]:
        raise UserError("the baseline does not pause")

    def hold_new(self, is_held: bool) -> None:
        raise UserError("the baseline does not pause")

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def schedule_transfers(self, *, awaits_report: bool = False) -> StepPlan | None:
        return None

    def sampling_inputs(self, plan: StepPlan) -> SamplingInputs:
        raise AssertionError("no plan expects any")

    def awaits_masks(self, plan: StepPlan) -> bool:
        raise AssertionError("no plan expects masks")

    can_discard = awaits_answers = awaits_others = False
    """There are no constraints."""

    def awaited(self) -> list[Matcher]:
        return []

    def settle(self, now: float) -> tuple[list[SequenceUpdate], list[tuple[str, UserError]]]:
        raise AssertionError("nothing awaits matchers")

    def forget_rows(self, *, adapters: bool) -> None:
        assert not self.has_requests, "rows of live requests"
        self._changes.released = []

    def unregister_prefix(self, name: str) -> int:
        raise UserError(f"no prefix {name!r} is registered", param="prefix_id")

    def _end(self, request: Request, ended: list[Sequence], reason: FinishReason) -> None:
        """End some or all sequences of a request."""
        for sequence in ended:
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence; with the last one the request leaves."""
        sequence.finish_reason = reason
        request, has_regions = sequence.request, sequence.request.status is RequestStatus.RUNNING
        if not request.live_sequences:
            if not has_regions:
                self._waiting.remove(request)
            request.status = RequestStatus.FINISHED
            self._deadlines.discard(request)
            del self._requests[request.request_id]
            self._stats.finished_requests_total += 1
        if has_regions:
            self._leave(request)

    @abstractmethod
    def _leave(self, request: Request) -> None:
        """A sequence of a request that has regions has ended, maybe not the last."""

    def _drop(self, sequence: Sequence) -> None:
        """Give back a sequence's region, and its row if the workers know it."""
        if sequence.blocks is not None:
            self._changes.release_slot(sequence)
        sequence.blocks = None
        self.kv.release(sequence.seq_id)

    # -- one step ---------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, or return None when nothing can be computed now."""
        builder = PlanBuilder(next(self._step_ids), self._max_num_batched_tokens)
        copies, self._copies = self._copies, []
        untold, self._untold = self._untold, {}
        self._plan(builder, now)
        if builder.is_idle:
            self._copies, self._untold = copies, untold
            return None
        for sequence, blocks in untold.items():
            if sequence.blocks is not None:
                builder.plan.new_blocks[sequence.seq_id] = [blocks]
        for due in copies:
            self._copy(builder, due)
        plan = builder.build(self._changes)
        self._in_flight[plan.step_id] = _Flight(builder.sequences, builder.samples)
        self._stats.steps_total += 1
        self._stats.scheduled_tokens_total += self._max_num_batched_tokens - builder.budget
        self._stats.copied_blocks_total += len(plan.block_copies)
        return plan

    @abstractmethod
    def _plan(self, builder: PlanBuilder, now: float) -> None:
        """Choose what the step computes."""

    def _try_start(self, request: Request, now: float) -> bool:
        """Reserve regions for all sequences of a request, if there is room; the caller takes it from the queue."""
        num_final = request.num_prompt_tokens + request.max_tokens
        seq_ids = [sequence.seq_id for sequence in request.live_sequences]
        if not self.kv.reserve(seq_ids, self._num_slots(request), num_final):
            return False
        request.status = RequestStatus.RUNNING
        request.first_scheduled_time, request.num_cached_tokens = now, 0
        self._stats.prompt_tokens_total += request.num_prompt_tokens
        self._rows.append(request)
        return True

    def _schedule_prompt(self, builder: PlanBuilder, request: Request, num_blocks: int | None = None) -> Sequence:
        """The whole prompt, in this step; parallel samples fork behind it. Returns the sequence that computes it.

        num_blocks: blocks of its region that it has in this step, and the rest from the next one on.
        """
        leader, *others = request.live_sequences
        leader.blocks = self.kv.blocks(leader.seq_id)
        builder.add_row(leader)
        builder.schedule(leader, request.num_prompt_tokens)
        table = leader.blocks.tables[0]
        if num_blocks is not None and num_blocks < len(table):
            self._untold[leader] = table[num_blocks:]
            builder.plan.new_sequences[-1].block_ids = [table[:num_blocks]]
        if request.beam_search is not None:
            return leader  # beams fork when the first tokens are known
        batch_index = len(builder.sequences) - 1
        for child in others:
            child.blocks = self.kv.blocks(child.seq_id)
            child.num_computed_tokens = request.num_prompt_tokens
            builder.plan.forks.append(SequenceFork(leader.seq_id, child.seq_id, child.sampling))
            builder.sample(child, batch_index)
            self._copies.append(_Copy(child, table[:num_blocks], request.num_prompt_tokens))
        return leader

    def _schedule_next(self, builder: PlanBuilder, sequence: Sequence, num_total: int) -> None:
        """One more token of a sequence that is to have `num_total`, unless the one before must be known first."""
        known, start = len(sequence.token_ids) + sequence.num_pending_tokens, sequence.num_computed_tokens
        is_final = sequence.request.beam_search is not None or known >= num_total
        if known > start and not (sequence.num_pending_tokens and is_final):
            builder.place(sequence, start, known - start, known)

    def _copy(self, builder: PlanBuilder, due: _Copy) -> None:
        """Put a child's own blocks in the place of its parent's, and copy those that hold tokens.

        The parent may have ended meanwhile: its blocks keep their content until this plan's model runs.
        """
        seq_id, blocks = due.child.seq_id, due.child.blocks
        if blocks is None:
            return
        own, num_known = blocks.tables[0], len(due.source)
        builder.plan.replaced_blocks += [(seq_id, 0, index, block) for index, block in enumerate(own[:num_known])]
        if num_known < len(own):
            builder.plan.new_blocks[seq_id] = [own[num_known:]]
        num_blocks = -(-due.num_tokens // self.kv.block_size)
        builder.plan.block_copies += zip(due.source[:num_blocks], own[:num_blocks], strict=True)

    def update(self, result: StepResult, now: float, *, may_go_ahead: bool = False) -> list[SequenceUpdate]:
        """Take the result of the oldest plan in flight: append tokens, stop, give regions back."""
        flight = self._in_flight.pop(result.step_id)
        updates: list[SequenceUpdate] = []
        if result.nonfinite:
            for request in live_requests(flight.sequences + flight.samples, result.nonfinite):
                updates += early_end(request, FinishReason.ERROR, now)
                self._end(request, request.live_sequences, FinishReason.ERROR)
        for position, (sequence, token_ids) in enumerate(zip(flight.samples, result.token_ids, strict=True)):
            (token_id,) = token_ids
            sequence.num_pending_tokens -= 1
            if sequence.finish_reason is not None:
                if sequence.blocks is not None:  # computed on with its batch
                    sequence.token_ids.append(token_id)
                continue
            if sequence.request.beam_search is not None:
                updates += self._follow(sequence, result.candidates[position], now)
                continue
            sequence.token_ids.append(token_id)
            update = SequenceUpdate(sequence.request.request_id, sequence.index, [token_id])
            if result.logprobs and position in result.logprobs:
                update.logprobs = result.logprobs[position]
            request = sequence.request
            if token_id in request.end_token_ids or len(sequence.token_ids) >= sequence.max_total_tokens:
                update.finish_reason, update.stop_reason = reason = finish_reason(sequence, token_id)
                self._finish(sequence, reason[0])
                report_times(update, request, now)
            elif sequence.num_output_tokens == 1 or request.params.stop:
                report_times(update, request, now)
            updates.append(update)
        self._stats.generation_tokens_total += sum(len(update.new_token_ids) for update in updates)
        if result.prompt_logprobs:
            attach_prompt_logprobs(result.prompt_logprobs, flight.sequences, updates)
        return updates

    def _follow(self, beam: Sequence, candidates: Candidates, now: float) -> list[SequenceUpdate]:
        """Take the candidates of one beam; with those of the last one, beams fork and die, or the search ends."""
        request, search = beam.request, beam.request.beam_search
        assert search is not None
        if not search.offer(beam, candidates):
            return []
        children = search.expand()
        assert children is not None, "there are no matchers to wait for"
        if search.is_done:
            updates = hypothesis_updates(request)
            for update in updates:
                report_times(update, request, now)
            self._end(request, request.live_sequences, updates[0].finish_reason or FinishReason.STOP)
            return updates
        self._changes.released += [
            each.seq_id for each in self._changes.beam_reorder.follow(search, children, _OwnRegions())
        ]
        for sequence in search.sequences:
            own = self.kv.blocks(sequence.seq_id)
            if sequence.blocks is not None and sequence.blocks is not own:
                untold = next((blocks for each, blocks in self._untold.items() if each.blocks is sequence.blocks), [])
                table = sequence.blocks.tables[0]
                source = table[: len(table) - len(untold)]
                self._copies.append(_Copy(sequence, source, sequence.num_computed_tokens))
                sequence.blocks = own
        return []

    # -- looking in -------------------------------------------------------------------------------------------------

    def accounts(self) -> SlotAccounts:
        """What the pool's slots are spent on now. O(regions)."""
        live = (s for request in self._rows for s in request.sequences if s.finish_reason is None)
        return self.kv.accounts({s.seq_id: s.num_computed_tokens for s in live})

    def stats(self) -> EngineStats:
        """A snapshot. Reserved slots are those that requests will fill, wasted ones those that no request ever will."""
        stats, accounts = self._stats, self.accounts()
        stats.num_used_blocks = stats.num_logical_blocks = self.kv.num_used_blocks
        stats.num_stored_tokens = accounts.stored
        stats.num_reserved_slots = accounts.reserved
        stats.num_wasted_slots = accounts.internal + accounts.rounding
        stats.num_waiting = len(self._waiting)
        stats.num_running = len(self._requests) - stats.num_waiting
        return copy.copy(stats)

    def current_load(self) -> Load:
        """Of the statistics what takes no counting."""
        num_waiting = len(self._waiting)
        num_running = len(self._requests) - num_waiting
        return Load(num_running, num_waiting, self.kv.num_used_blocks, self._stats.preemptions_total)

    def snapshot(self, now: float = 0.0) -> KVSnapshot:
        """Every block and every live request, to look at."""
        live = list(self._requests.values())
        return KVSnapshot(
            block_size=self.kv.block_size,
            block_sizes=[self.kv.block_size],
            windows=[None],
            states=self.kv.states(),
            host_states=bytes(1),
            requests=[_view(request, self.kv.block_size) for request in live],
        )

    def check(self) -> None:
        """Assert that regions, rows and requests agree. O(blocks + requests)."""
        holders = [
            sequence
            for request in self._rows
            for sequence in request.sequences
            # A request that ended while it waited never had a region.
            if sequence.finish_reason is None or (self.keeps_ended and sequence.seq_id in self.kv)
        ]
        self.kv.check({sequence.seq_id for sequence in holders})
        with_rows = [sequence for sequence in holders if sequence.blocks is not None]
        assert all(s.blocks is self.kv.blocks(s.seq_id) for s in with_rows), "a sequence writes to another's region"
        self._changes.beam_reorder.check(with_rows)
        assert len(holders) <= self._max_num_seqs
        assert len(self._requests) == len(self._waiting) + sum(bool(r.live_sequences) for r in self._rows)
        accounts = self.accounts()
        parts = accounts.stored, accounts.reserved, accounts.internal, accounts.rounding, accounts.free
        assert min(parts) >= 0
        assert sum(parts) == accounts.total, f"{accounts} does not add up"


def _view(request: Request, block_size: int) -> RequestView:
    sequences = []
    for sequence in request.live_sequences:
        table = [] if sequence.blocks is None else list(sequence.blocks.tables[0])
        filled = sequence.num_computed_tokens
        tail = (filled - 1) % block_size + 1 if filled else 0
        sequences.append(SequenceView(sequence.index, sequence.num_output_tokens, filled, tail, [table], [[]]))
    return RequestView(
        request_id=request.request_id,
        status=request.status.name.lower(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=0,
        num_preemptions=0,
        num_image_tokens=0,
        waits_for_prefix=False,
        sequences=sequences,
    )
