"""Plan under construction: token budget and columns of one scheduling pass, with rollback."""

from __future__ import annotations

from quire.decoding.drafts import Drafts
from quire.decoding.parallel import fork_siblings
from quire.decoding.sequence import Request, Sequence
from quire.kv_cache.block_table import BlockAllocation, BlockTable
from quire.kv_cache.manager import KVCacheManager
from quire.multimodal.positions import row_fields
from quire.scheduler.beam_reorder import BeamReorder
from quire.scheduler.in_flight import InFlight
from quire.step import HostTransfers, NewSequence, StepPlan


class PlanChanges:
    """Changes since the last plan, for the next one: `StepPlan.released`, `StepPlan.trimmed_tables` and beam
    reorders."""

    def __init__(self) -> None:
        self.released: list[int] = []
        self.trimmed: dict[int, list[int]] = {}
        self.beam_reorder = BeamReorder()

    @property
    def is_empty(self) -> bool:
        return not (self.released or self.trimmed) and self.beam_reorder.is_empty

    def release_slot(self, sequence: Sequence) -> None:
        sequence.fast_path_until = sequence.num_unsent_tokens = 0
        self.trimmed.pop(sequence.seq_id, None)
        if self.beam_reorder.forget(sequence):
            self.released.append(sequence.seq_id)

    def move_to(self, plan: StepPlan) -> None:
        """Let a plan carry the changes, and forget them."""
        plan.released, self.released = self.released, []
        plan.trimmed_tables, self.trimmed = self.trimmed, {}
        plan.beam_reorders, plan.token_overrides = self.beam_reorder.take()


class PlanBuilder:
    """Fills one plan during one pass of `Scheduler.schedule`. The running set, Admitter and gates add to it."""

    def __init__(self, step_id: int, budget: int) -> None:
        self.start_positions: list[int] = []
        self.num_tokens: list[int] = []
        self.sample_from: list[int] = []
        self.plan = StepPlan(step_id, [], self.start_positions, self.num_tokens, [], self.sample_from)
        """Plan to which `build` adds `seq_ids`, `sample_seq_ids` and changes."""
        self.budget = budget
        """Tokens that may still be scheduled."""
        self.num_steady = 0
        """Sequences placed by `place_steady`."""
        self.sequences: list[Sequence] = []
        self.filled: list[tuple[Sequence, BlockTable, int]] = []
        """See `InFlight.filled`."""
        self.num_drafts: dict[int, int] = {}
        """Batch index -> drafts among its tokens."""
        self.samples: list[Sequence] = []
        self.grown: list[tuple[Sequence, BlockAllocation]] = []
        """Allocations for sequences with a request slot, which a rollback undoes."""
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.resumed: list[tuple[Sequence, BlockTable, int]] = []
        """Sequences swapped in, with their blocks and numbers of computed tokens."""
        self.forked: list[tuple[Sequence, list[Sequence]]] = []

    def grow(self, sequence: Sequence, allocation: BlockAllocation) -> None:
        self.grown.append((sequence, allocation))
        if any(allocation.new_blocks):
            self.plan.new_blocks[sequence.seq_id] = allocation.new_blocks
        if allocation.replaced:
            self.plan.block_copies += allocation.copies
            self.plan.replaced_blocks += [(sequence.seq_id, *entry) for entry in allocation.replaced]

    def add_row(self, sequence: Sequence) -> None:
        """Give a sequence a request slot on the workers, with its present blocks."""
        assert sequence.blocks is not None
        new = NewSequence(
            seq_id=sequence.seq_id,
            token_ids=list(sequence.token_ids),
            num_prompt_tokens=sequence.request.num_prompt_tokens,
            block_ids=[list(table) for table in sequence.blocks.tables],
            sampling=sequence.sampling,
            text_scope=sequence.request.text_scope,
            prediction=sequence.request.prediction,
            **row_fields(sequence.request),
        )
        self.plan.new_sequences.append(new)

    @property
    def is_idle(self) -> bool:
        """True if the plan runs, encodes and swaps nothing; a sequence that swaps in without copies counts."""
        plan = self.plan
        return not (self.sequences or plan.new_sequences or self.swap_out or self.swap_in or plan.images)

    def schedule(self, sequence: Sequence, num_tokens: int) -> None:
        """Add a batch entry, advance the sequence's counters, and sample if this reaches its last token."""
        known = len(sequence.token_ids) + sequence.num_pending_tokens
        self.place(sequence, sequence.num_computed_tokens, num_tokens, known)

    def place(self, sequence: Sequence, start: int, num_tokens: int, known: int) -> None:
        """Same as `schedule`, with counters that the caller has read. start: computed tokens. known: sequence's
        tokens, those that earlier plans will sample included."""
        self.sequences.append(sequence)
        self.start_positions.append(start)
        self.num_tokens.append(num_tokens)
        self.budget -= num_tokens
        sequence.num_computed_tokens = end = start + num_tokens
        blocks = sequence.blocks
        assert blocks is not None, "a sequence that runs has blocks"
        if num_tokens > 1 or end == blocks.capacity:
            self.filled.append((sequence, blocks, end))
        if end == known:
            self.samples.append(sequence)
            self.sample_from.append(len(self.sequences) - 1)
            sequence.num_pending_tokens += 1
            request = sequence.request
            if request.pooling:
                self.plan.pooled.append(len(self.samples) - 1)
            elif request.constraint is not None:
                self.plan.masked_samples.append(len(self.samples) - 1)

    def append_forced(self, sequence: Sequence) -> None:
        """Put into the plan the tokens that the constraint forced on a sequence: the workers have not sampled them."""
        self.plan.appended[sequence.seq_id] = sequence.token_ids[-sequence.num_unsent_tokens :]
        sequence.num_unsent_tokens = 0

    def place_drafts(self, drafts: Drafts) -> None:
        """Add drafts after the last token of the last entry's sequence, sampled."""
        sequence, num_drafts = self.sequences[-1], drafts.num_tokens
        assert sequence.blocks is not None, "a sequence that runs has blocks"
        if num_drafts:
            self.num_drafts[len(self.sequences) - 1] = num_drafts
            if drafts.token_ids is not None:
                self.plan.drafts[sequence.seq_id] = drafts.token_ids
            self.num_tokens[-1] += num_drafts
            self.budget -= num_drafts
            sequence.num_computed_tokens += num_drafts
            sequence.num_pending_tokens += num_drafts
            sequence.num_pending_drafts += num_drafts
        if sequence.num_pending_drafts and not (self.filled and self.filled[-1][0] is sequence):
            # Where its tokens end is not known: maybe at the end of a block.
            self.filled.append((sequence, sequence.blocks, sequence.num_computed_tokens))

    def place_steady(self, running: list[Sequence], index: int) -> int:
        """`place` the sequences from `index` on, one token each, up to the first that may need a new block, drafts or
        an end (`Sequence.fast_path_until`); returns its index."""
        starts = []
        for place in range(index, len(running)):
            sequence = running[place]
            start, until = sequence.num_computed_tokens, sequence.fast_path_until
            if start >= until:
                break
            starts.append(start)
            sequence.num_computed_tokens = end = start + 1
            sequence.num_pending_tokens += 1
            if end == until and sequence.blocks is not None:
                self.filled.append((sequence, sequence.blocks, end))
        if starts:
            count, batch_index = len(starts), len(self.sequences)
            steady = running[index : index + count]
            self.sequences += steady
            self.samples += steady
            self.start_positions += starts
            self.sample_from += range(batch_index, batch_index + count)
            self.num_tokens += [1] * count
            self.budget -= count
            self.num_steady += count
            index += count
        return index

    def sample(self, sequence: Sequence, batch_index: int) -> None:
        self.samples.append(sequence)
        self.sample_from.append(batch_index)
        sequence.num_pending_tokens += 1
        if sequence.request.constraint is not None:
            self.plan.masked_samples.append(len(self.samples) - 1)

    def fork(self, parent: Sequence, kv: KVCacheManager) -> None:
        """Order forks of `parent`, the last entry, after this step: its request's other sequences copy its slot. Those
        without output sample from its logits."""
        batch_index = len(self.sequences) - 1
        children = []
        for child, fork in fork_siblings(parent, kv):
            self.plan.forks.append(fork)
            children.append(child)
            child.first_step_id = self.plan.step_id
            if fork.token_ids is None:
                self.sample(child, batch_index)
        self.forked.append((parent, children))

    def undo(self, request: Request, kv: KVCacheManager) -> None:
        """Undo this pass's work on a request's sequences, so their block tables match the earlier plans. For a request
        preempted after it was scheduled."""
        for sequence, allocation in self.rollback(request):
            assert sequence.blocks is not None
            kv.rollback(sequence.blocks, allocation)

    def rollback(self, request: Request) -> list[tuple[Sequence, BlockAllocation]]:
        """Remove the entries of a request that is being preempted; they are the last ones. Returns its allocations,
        which the caller undoes in this order."""
        assert all(parent.request is not request for parent, _ in self.forked), "a forking request is preempted"
        plan = self.plan
        while self.samples and self.samples[-1].request is request:
            self.samples.pop().num_pending_tokens -= 1
            self.sample_from.pop()
        for indices in (plan.pooled, plan.masked_samples):
            while indices and indices[-1] >= len(self.samples):
                indices.pop()
        while self.sequences and self.sequences[-1].request is request:
            sequence, count = self.sequences.pop(), self.num_tokens.pop()
            self.start_positions.pop()
            num_drafts = self.num_drafts.pop(len(self.sequences), 0)
            plan.drafts.pop(sequence.seq_id, None)
            plan.appended.pop(sequence.seq_id, None)
            sequence.num_pending_tokens -= num_drafts
            sequence.num_pending_drafts -= num_drafts
            sequence.num_computed_tokens -= count
            self.budget += count
            plan.new_blocks.pop(sequence.seq_id, None)
        while self.filled and self.filled[-1][0].request is request:
            self.filled.pop()
        undone = []
        while self.grown and self.grown[-1][0].request is request:
            undone.append(self.grown.pop())
            allocation = undone[-1][1]
            del plan.block_copies[len(plan.block_copies) - len(allocation.copies) :]
            del plan.replaced_blocks[len(plan.replaced_blocks) - len(allocation.replaced) :]
        return undone

    def order_transfers(self, kv: KVCacheManager, *, may_wait: bool, awaits_report: bool) -> None:
        """Add the KV connector's orders at the pass' end. may_wait: the workers may wait for a transfer, as there is
        nothing else to compute. awaits_report: they must wait for a report."""
        kv.transfer_blocks.release()
        transfers = kv.connector.orders(may_allocate=not self.resumed)
        if may_wait and not (transfers is not None and transfers.swap_in):
            awaits_report |= kv.awaits_transfers
        if awaits_report:
            transfers = transfers or HostTransfers()
            transfers.awaits_report = True
        self.plan.transfers = transfers

    def in_flight(self) -> InFlight:
        """Scheduler's data on the built plan, until its result comes."""
        return InFlight(self.plan, self.sequences, self.filled, self.samples, self.forked, self.resumed, [])

    def build(self, changes: PlanChanges) -> StepPlan:
        """Plan, which carries and clears the changes since the last one."""
        plan = self.plan
        if self.swap_out or self.swap_in:
            transfers = plan.transfers = plan.transfers or HostTransfers()
            transfers.swap_out = self.swap_out + transfers.swap_out
            transfers.swap_in = self.swap_in + transfers.swap_in
        plan.seq_ids = plan.sample_seq_ids = [sequence.seq_id for sequence in self.sequences]
        if self.num_steady != len(self.sequences) and self.samples != self.sequences:
            plan.sample_seq_ids = [sequence.seq_id for sequence in self.samples]
        if self.num_drafts:
            plan.num_drafts = [self.num_drafts.get(index, 0) for index in range(len(self.sequences))]
        if not changes.is_empty:
            changes.move_to(plan)
        return plan
