"""FakeExecutor: an executor without tensors that holds the control plane to its contract.

A KV slot holds a number that depends on every token up to its position, as a real key does. A plan that skips a
position, writes into a shared block, reuses a block that is still read or hits the wrong prefix therefore either breaks
a rule that is checked here or reads a number that does not fit the sequence's own tokens, and raises
ContractViolationError. The sampled token is a function of those numbers, so it is the same alone, batched, chunked,
cached and preempted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from quire.executors.interface import VitalSigns
from quire.kv_cache.layout import NULL_BLOCK, KVCacheLayout, KVGroup
from quire.kv_cache.sizing import MemoryProfile
from quire.kv_cache.spec import LayerSpec
from quire.scheduler.preemption import PreemptionCosts
from quire.step import Candidates, NewSequence, PromptLogprobs, SequenceFork, SequenceSampling, StepPlan, StepResult
from tests.fakes.groups import Kind, first_read, layer_spec, read_by, written_by
from tests.fakes.token_rule import ChooseToken, TokenRule, mix, pooled_vector
from tests.fakes.transfers import FakeWorkerConnector, copies

ProposeDrafts = Callable[[int, list[int], int], list[int]]
"""(seq_id, the tokens that the model would choose, how many drafts) -> the drafts of a worker."""


class ContractViolationError(AssertionError):
    """A plan broke the contract of quire/step.py."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ContractViolationError(message)


@dataclass
class _Row:
    """A live sequence as a worker knows it. num_computed: None: a row that has just begun starts anywhere. chain[p]
    depends on tokens 0..p. drafts: the current step's. rejected: number of a step, drafts of it that were rejected."""

    token_ids: list[int]
    num_prompt_tokens: int
    tables: list[list[int]]
    sampling: SequenceSampling
    num_computed: int | None
    chain: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    rejected: list[tuple[int, int]] = field(default_factory=list)

    def extend_chain(self, end: int) -> None:
        """Up to the token before position `end`: a step does the work of its own tokens."""
        for position in range(len(self.chain), end):
            self.chain.append(mix(self.chain[-1] if self.chain else 0, self.token_ids[position], position))


class FakeExecutor:
    """See the module's docstring.

    windows: the kind of each layer. latency: seconds a step takes, on its own thread, while `hurry` is not set.
    fail_at_step: the future of the plan with that number (from 0) fails with RuntimeError. load_error: of `load`.
    choose: replaces the rule that picks tokens. verify=False: trust the plans and only make tokens, which then depend
    on what the prefix cache had (for benchmarks). record=True: keep every plan in `plans`.
    """

    def __init__(
        self,
        *,
        windows: Sequence[Kind] = (None, None),
        vocab_size: int = 97,
        latency: float = 0.0,
        fail_at_step: int | None = None,
        load_error: Exception | None = None,
        choose: ChooseToken | None = None,
        verify: bool = True,
        record: bool = False,
    ) -> None:
        self._specs = [layer_spec(kind) for kind in windows]
        self._rule = TokenRule(vocab_size, choose)
        self._latency = latency
        self.hurry = threading.Event()
        self._fail_at_step = fail_at_step
        self._load_error = load_error
        self._verify = verify
        self._record = record
        self.propose_drafts: ProposeDrafts | None = None
        """Drafts for sequences with `num_drafts` for which a plan has none."""
        self.queue_depth = 1  # how far a plan may be ahead of the results that the scheduler has seen
        self.num_drafts = self.num_accepted_drafts = 0
        self.connector: FakeWorkerConnector | None = None
        """The worker's half of the KV connector; set it before the first plan."""
        self.nonfinite_token: int | None = None  # behind it a sequence's logits are no numbers
        self.observe: Callable[[StepPlan], None] | None = None  # called with every plan, in order
        self.costs = PreemptionCosts(seconds_per_block=1.0, seconds_per_token=0.5)
        """What swapping and recomputing are said to take."""
        self._thread = ThreadPoolExecutor(1, "fake-executor") if latency else None
        self._rows: dict[int, _Row] = {}
        self._owners: Counter[int] = Counter()
        self._slots: dict[int, list[int | None]] = {}
        self._host_slots: dict[int, list[int | None]] = {}
        self._layout: KVCacheLayout | None = None
        # Not enforced unless `profile` tells them: a core whose pool has a given size does not profile.
        self._max_num_batched_tokens = self._max_num_seqs = 2**62
        self._last_step_id: int | None = None
        self.plans: list[StepPlan] = []
        self.num_steps = self.asleep = 0
        self.is_shut_down = False
        self.has_woken_weights = False
        self.wake_error: Exception | None = None
        self.idle_work = self.num_idle_calls = 0  # pieces of work that can wait, and how often was asked for one

    @property
    def live_seq_ids(self) -> list[int]:
        return sorted(self._rows)

    # The Executor protocol.

    def load_model(self) -> list[LayerSpec]:
        if self._load_error is not None:
            raise self._load_error
        return list(self._specs)

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        return MemoryProfile(available=2**22, activations=2**16, weights=2**20)

    def allocate(self, layout: KVCacheLayout) -> None:
        self._layout = layout

    def measure_preemption_costs(self) -> PreemptionCosts:
        assert self._layout is not None, "allocate() comes first"
        return self.costs

    def describe_backend(self) -> str:
        return "fake executor"

    def expert_counts(self) -> list[list[int]]:
        return []

    def expert_ranks(self) -> list[list[list[int]]]:
        return []

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        _require(not self.is_shut_down, "a plan after shutdown")
        if self._record:
            self.plans.append(plan)
        if self.observe is not None:
            self.observe(plan)
        if self._thread is not None:
            return self._thread.submit(self._run, plan)
        future: Future[StepResult] = Future()
        try:
            future.set_result(self._run(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def idle(self) -> bool:
        self.num_idle_calls += 1
        return self.num_idle_calls <= self.idle_work

    def vital_signs(self) -> VitalSigns:
        return VitalSigns()

    def sleep(self, level: int) -> None:
        """Everything that blocks hold is gone, and so are the rows."""
        self.asleep = level
        self.has_woken_weights = False
        self._rows.clear()
        self._owners.clear()
        self._slots.clear()
        self._host_slots.clear()

    def wake_weights(self) -> None:
        self.has_woken_weights = True

    def wake_up(self) -> None:
        assert self._layout is not None
        if self.wake_error is not None:
            raise self.wake_error
        self.asleep = 0
        self.allocate(self._layout)

    def shutdown(self) -> None:
        self.is_shut_down = True
        self.hurry.set()
        if self._thread is not None:
            self._thread.shutdown()

    # One plan, in the order that quire/step.py says.

    def _run(self, plan: StepPlan) -> StepResult:
        if self._latency:
            self.hurry.wait(self._latency)
        if self.num_steps == self._fail_at_step:
            raise RuntimeError(f"injected failure at step {self._fail_at_step}")
        self.num_steps += 1
        if self._verify:
            self._check_shape(plan)
        for seq_id in plan.released:
            _require(seq_id in self._rows, f"released sequence {seq_id} has no row")
            self._disown(self._rows.pop(seq_id))
        for seq_id, kept in plan.trimmed_tables.items():
            self._trim(seq_id, kept)
        for new in plan.new_sequences:
            self._create(new)
        for fork in plan.beam_reorders:
            self._reorder_beam(fork)
        for seq_id, token_id in plan.token_overrides:
            self._overrule(seq_id, token_id)
        for seq_id, token_ids in plan.appended.items():
            self._append(seq_id, token_ids)
        self._save_to_host(copies(plan).swap_out)
        self._copy_blocks(plan.block_copies)
        if self._verify:
            # What left a window is not read any more, so this very plan may give it to another sequence.
            for seq_id, start in zip(plan.seq_ids, plan.start_positions, strict=True):
                row = self._row(seq_id)
                for group in range(self._num_groups):
                    self._drop_outside_window(row, group, start if row.num_computed is None else row.num_computed)
        self._update_tables(plan)
        self._check_swapped_in_are_left_alone(plan)
        result = StepResult(step_id=plan.step_id, token_ids=[])
        for index, (seq_id, start) in enumerate(zip(plan.seq_ids, plan.start_positions, strict=True)):
            num_drafts = plan.num_drafts[index] if plan.num_drafts else 0
            start = self._check_start(seq_id, start)
            self._draft(seq_id, num_drafts, plan.drafts.get(seq_id))
            self._compute(seq_id, start, plan.num_tokens[index], result)
        # The latest moment that the contract allows: a read of one of these blocks before it finds something else.
        self._load_from_host(copies(plan).swap_in)
        for fork in plan.forks:
            self._fork(fork)
        self._sample(plan, result)
        if self.connector is not None:
            result.transfers = self.connector.run(plan, self._host_slots, self._slots)
        else:
            _require(not copies(plan).awaits_report, "the plan waits for a KV connector that is not there")
        return result

    def _check_shape(self, plan: StepPlan) -> None:
        batch = len(plan.seq_ids)
        _require(len(plan.start_positions) == batch == len(plan.num_tokens), "columns of different length")
        _require(len(set(plan.seq_ids)) == batch, f"a sequence is scheduled twice: {plan.seq_ids}")
        _require(len(plan.num_drafts) in (0, batch), "the column of drafts has a different length")
        for index, count in enumerate(plan.num_drafts):
            own = [s for s, source in zip(plan.sample_seq_ids, plan.sample_from, strict=True) if source == index]
            _require(not count or own == [plan.seq_ids[index]], f"drafts of {plan.seq_ids[index]}, not sampled alone")
            _require(0 <= count < plan.num_tokens[index], f"{count} drafts in {plan.num_tokens[index]} tokens")
        _require(len(plan.sample_seq_ids) == len(plan.sample_from), "sample columns of different length")
        _require(len(set(plan.sample_seq_ids)) == len(plan.sample_seq_ids), "a sequence is sampled twice")
        _require(plan.pooled == sorted(set(plan.pooled)), f"pooled samples are out of order: {plan.pooled}")
        drafted = [index for index in plan.pooled if plan.num_drafts and plan.num_drafts[plan.sample_from[index]]]
        _require(not drafted, f"drafts behind the pooled samples {drafted}")
        _require(all(count >= 1 for count in plan.num_tokens), f"nothing to compute: {plan.num_tokens}")
        _require(
            plan.total_tokens <= self._max_num_batched_tokens,
            f"{plan.total_tokens} tokens exceed the budget of {self._max_num_batched_tokens}",
        )
        _require(batch <= self._max_num_seqs, f"{batch} sequences exceed max_num_seqs {self._max_num_seqs}")
        _require(
            self._last_step_id is None or plan.step_id > self._last_step_id,
            f"step {plan.step_id} after step {self._last_step_id}",
        )
        self._last_step_id = plan.step_id

    def _create(self, new: NewSequence) -> None:
        _require(new.seq_id not in self._rows, f"new sequence {new.seq_id} already has a row")
        _require(len(new.token_ids) >= 1, f"new sequence {new.seq_id} has no tokens")
        row = _Row(
            token_ids=list(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            tables=[list(table) for table in new.block_ids],
            sampling=new.sampling,
            num_computed=None,
        )
        _require(len(row.tables) == self._num_groups, f"{len(row.tables)} tables for {self._num_groups} groups")
        self._own(row)
        self._rows[new.seq_id] = row

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if not self._verify:
            return
        destinations = {destination for _, destination in copies}
        _require(len(destinations) == len(copies), f"two copies into one block: {copies}")
        for source, destination in copies:
            _require(source not in destinations, f"block {source} is copied from and into in one step: {copies}")
            self._check_block(source)
            self._check_block(destination)
            self._slots[destination] = list(self._block(source))

    def _save_to_host(self, pairs: list[tuple[int, int]]) -> None:
        _require(len({host for _, host in pairs}) == len(pairs), f"two blocks are saved into one: {pairs}")
        for block, host in pairs:
            self._check_block(block)
            self._check_host_block(host)
            self._host_slots[host] = list(self._block(block))

    def _load_from_host(self, pairs: list[tuple[int, int]]) -> None:
        _require(len({block for _, block in pairs}) == len(pairs), f"two blocks are loaded into one: {pairs}")
        for host, block in pairs:
            self._check_block(block)
            self._check_host_block(host)
            _require(host in self._host_slots, f"host block {host} was never written")
            self._slots[block] = list(self._host_slots[host])

    def _check_swapped_in_are_left_alone(self, plan: StepPlan) -> None:
        """The blocks may arrive at any time until the next plan."""
        arriving = {block for _, block in copies(plan).swap_in}
        copied = {block for pair in plan.block_copies for block in pair}
        _require(not arriving & copied, f"blocks {arriving & copied} are copied while they arrive")
        for seq_id in plan.seq_ids if arriving else []:
            used = {block for table in self._row(seq_id).tables for block in table}
            _require(not arriving & used, f"sequence {seq_id} runs while its blocks {arriving & used} arrive")

    def _update_tables(self, plan: StepPlan) -> None:
        for seq_id, groups in plan.new_blocks.items():
            _require(len(groups) == self._num_groups, f"sequence {seq_id}: {len(groups)} groups of new blocks")
            for table, block_ids in zip(self._row(seq_id).tables, groups, strict=True):
                table.extend(block_ids)
                for block_id in block_ids:
                    if self._verify:
                        self._check_block(block_id)
                        _require(self._owners[block_id] == 0, f"block {block_id} of {seq_id} is new but in use")
                        self._owners[block_id] += 1
        for seq_id, group, index, block_id in plan.replaced_blocks:
            table = self._row(seq_id).tables[group]
            _require(index < len(table), f"sequence {seq_id} replaces block {index} of {len(table)}")
            if self._verify:
                self._release_block(table[index])
                if block_id != NULL_BLOCK:
                    self._check_block(block_id)
                    _require(self._owners[block_id] == 0, f"block {block_id} of {seq_id} replaces but is in use")
                    self._owners[block_id] += 1
            table[index] = block_id

    def _compute(self, seq_id: int, start: int, count: int, result: StepResult) -> None:
        row = self._row(seq_id)
        end = start + count
        known = len(row.token_ids)
        _require(
            end == known + len(row.drafts) if row.drafts else end <= known,
            f"sequence {seq_id} computes up to {end} of {known} tokens and {len(row.drafts)} drafts",
        )
        row.token_ids += row.drafts
        if not self._verify and len(row.chain) < start:
            row.chain += [0] * (start - len(row.chain))  # what the cache had is not this step's work
        row.extend_chain(end)
        del row.token_ids[known:]
        if self._verify:
            for group in range(self._num_groups):
                self._check_read(seq_id, row, group, start)
                self._write(seq_id, row, group, start, end)
        row.num_computed = end - len(row.drafts)
        wanted = row.sampling.params.prompt_logprobs
        last = min(end, row.num_prompt_tokens - 1)
        if wanted is not None and start + 1 <= last:
            positions = range(start + 1, last + 1)
            entries = [self._rule.logprobs(row.token_ids[p], row.chain[p - 1], wanted) for p in positions]
            result.prompt_logprobs[seq_id] = PromptLogprobs(start=start + 1, entries=entries)

    def _fork(self, fork: SequenceFork) -> None:
        parent = self._row(fork.parent)
        _require(fork.child not in self._rows, f"fork: sequence {fork.child} already has a row")
        child = _Row(
            token_ids=list(parent.token_ids if fork.token_ids is None else fork.token_ids),
            num_prompt_tokens=parent.num_prompt_tokens,
            tables=[list(table) for table in parent.tables],
            sampling=fork.sampling,
            num_computed=parent.num_computed if fork.token_ids is None else None,
        )
        self._own(child)
        self._rows[fork.child] = child

    def _reorder_beam(self, fork: SequenceFork) -> None:
        parent = self._row(fork.parent)
        _require(fork.child not in self._rows, f"branch: sequence {fork.child} already has a row")
        _require(fork.token_ids is None, "a branch has no history of its own")
        child = replace(
            parent,
            token_ids=list(parent.token_ids),
            tables=[list(table) for table in parent.tables],
            chain=list(parent.chain),
            sampling=fork.sampling,
        )
        self._own(child)
        self._rows[fork.child] = child

    def _overrule(self, seq_id: int, token_id: int) -> None:
        row = self._row(seq_id)
        _require(row.sampling.num_candidates > 0, f"a token is chosen for {seq_id}, which is no beam")
        _require(
            len(row.chain) == row.num_computed == len(row.token_ids) - 1,
            f"the token chosen for {seq_id} would replace one that was computed",
        )
        row.token_ids[-1] = token_id

    def _append(self, seq_id: int, token_ids: list[int]) -> None:
        row = self._row(seq_id)
        _require(bool(token_ids), f"no tokens are appended to {seq_id}")
        _require(
            row.num_computed == len(row.token_ids) - 1,
            f"tokens are appended to {seq_id}, of which {row.num_computed} of {len(row.token_ids)} are computed",
        )
        row.token_ids += token_ids

    def _sample(self, plan: StepPlan, result: StepResult) -> None:
        """Every token is picked before any row grows: a child reads its parent's logits, not its token."""
        for index, (seq_id, source) in enumerate(zip(plan.sample_seq_ids, plan.sample_from, strict=True)):
            row, read = self._row(seq_id), self._rows[plan.seq_ids[source]]
            known = len(row.token_ids)
            _require(
                read.num_computed == known and (read is row or read.token_ids[:known] == row.token_ids),
                f"sequence {seq_id} of {known} tokens is sampled after {read.num_computed} computed ones",
            )
            state = read.chain[known - 1]
            if index in plan.pooled:
                _require(read is row, f"the vector of {seq_id} would be that of {plan.seq_ids[source]}")
                result.pooled[index], token_ids = pooled_vector(state), []
            else:
                token_ids = self._accept(index, row, read)
            if row.sampling.num_candidates:
                result.candidates[index] = self._candidates(index, row.sampling, known - row.num_prompt_tokens, state)
                token_ids = [result.candidates[index].token_ids[0]]
            result.token_ids.append(token_ids)
            num_top = row.sampling.params.logprobs
            if row.sampling.params.ranks_samples and num_top is None:
                num_top = 0
            elif row.sampling.num_candidates:
                num_top = None
            if num_top is not None:
                states = zip(token_ids, read.chain[known - 1 :], strict=False)
                result.logprobs[index] = [self._rule.logprobs(*each, num_top) for each in states]
            if self.nonfinite_token is not None and self.nonfinite_token in read.token_ids[:known]:
                result.nonfinite.append(seq_id)
                result.candidates.pop(index, None)
                result.logprobs.pop(index, None)
                result.pooled.pop(index, None)
        for seq_id, token_ids in zip(plan.sample_seq_ids, result.token_ids, strict=True):
            row = self._rows[seq_id]
            if row.drafts:
                self.num_drafts += len(row.drafts)
                self.num_accepted_drafts += len(token_ids) - 1
                row.rejected.append((self.num_steps, len(row.drafts) + 1 - len(token_ids)))
                row.num_computed = len(row.token_ids) + len(token_ids) - 1
                del row.chain[row.num_computed :]
                row.drafts = []
            row.token_ids += token_ids
        if self._verify:
            rows = len(self._rows)
            _require(rows <= self._max_num_seqs, f"{rows} rows exceed max_num_seqs {self._max_num_seqs}")

    def _candidates(self, index: int, sampling: SequenceSampling, num_generated: int, state: int) -> Candidates:
        """Of the sample `index`."""
        return self._rule.candidates(sampling, num_generated, state)

    # Drafts.

    def _trim(self, seq_id: int, kept: list[int]) -> None:
        for table, num_blocks in zip(self._row(seq_id).tables, kept, strict=True):
            _require(num_blocks <= len(table), f"sequence {seq_id} is cut to {num_blocks} of {len(table)} blocks")
            if self._verify:
                for block_id in table[num_blocks:]:
                    self._release_block(block_id)
            del table[num_blocks:]

    def _check_start(self, seq_id: int, start: int) -> int:
        """Where the sequence really starts. What the plan says is more by the drafts that were rejected since the last
        result that the scheduler has seen."""
        row = self._row(seq_id)
        if row.num_computed is None:
            return start
        row.rejected = [(step, count) for step, count in row.rejected if step > self.num_steps - self.queue_depth]
        _require(
            0 <= start - row.num_computed <= sum(count for _, count in row.rejected),
            f"sequence {seq_id} starts at {start} but has computed {row.num_computed} tokens",
        )
        return row.num_computed

    def _draft(self, seq_id: int, num_drafts: int, proposed: list[int] | None) -> None:
        """Give a row the drafts of this step: those of the plan, or the worker's own."""
        row = self._row(seq_id)
        row.drafts = proposed or []
        if num_drafts and proposed is None:
            _require(self.propose_drafts is not None, f"drafts are asked for {seq_id}, and this worker has none")
            assert self.propose_drafts is not None
            row.drafts = list(self.propose_drafts(seq_id, self.foresee(seq_id, num_drafts), num_drafts))
        _require(len(row.drafts) == num_drafts, f"{len(row.drafts)} drafts of {seq_id} instead of {num_drafts}")

    def foresee(self, seq_id: int, count: int) -> list[int]:
        """The next tokens of a sequence, one after the other."""
        row = self._row(seq_id)
        ahead = replace(row, token_ids=list(row.token_ids), chain=list(row.chain))
        pick, known = self._rule.pick, ahead.token_ids
        for _ in range(count):
            ahead.extend_chain(len(known))
            known.append(pick(row.sampling, known, row.num_prompt_tokens, ahead.chain[-1]))
        return ahead.token_ids[len(row.token_ids) :]

    def _allowed(self, index: int, place: int, token_id: int) -> int:
        """The token that a sample gets behind `place` drafts, where the model would choose this one; -1: none."""
        return token_id

    def _accept(self, index: int, row: _Row, read: _Row) -> list[int]:
        """Those leading drafts of a row that are what the model chooses, and the token behind them."""
        accepted: list[int] = []
        for place, state in enumerate(read.chain[len(row.token_ids) - 1 :][: len(row.drafts) + 1]):
            all_ids = row.token_ids + accepted if accepted else row.token_ids
            token_id = self._rule.pick(row.sampling, all_ids, row.num_prompt_tokens, state)
            token_id = self._allowed(index, place, token_id)
            if token_id < 0:
                break
            accepted.append(token_id)
            # Behind a token with non-finite logits nothing is accepted: the next step reports them.
            if place == len(row.drafts) or token_id != row.drafts[place] or token_id == self.nonfinite_token:
                break
        return accepted

    # Blocks.

    @property
    def _num_groups(self) -> int:
        assert self._layout is not None, "allocate() comes first"
        return len(self._layout.groups)

    def _row(self, seq_id: int) -> _Row:
        _require(seq_id in self._rows, f"sequence {seq_id} has no row")
        return self._rows[seq_id]

    def _block(self, block_id: int) -> list[int | None]:
        assert self._layout is not None
        size = max(group.block_size for group in self._layout.groups)
        return self._slots.setdefault(block_id, [None] * size)

    def _group(self, group: int) -> KVGroup:
        assert self._layout is not None
        return self._layout.groups[group]

    def _check_block(self, block_id: int) -> None:
        assert self._layout is not None
        _require(0 < block_id < self._layout.num_blocks, f"block {block_id} is not one of the pool's")

    def _check_host_block(self, block_id: int) -> None:
        assert self._layout is not None
        _require(0 < block_id <= self._layout.num_host_blocks, f"host block {block_id} is not one of the pool's")

    def _own(self, row: _Row) -> None:
        if self._verify:
            for table in row.tables:
                for block_id in table:
                    if block_id != NULL_BLOCK:
                        self._check_block(block_id)
                        self._owners[block_id] += 1

    def _disown(self, row: _Row) -> None:
        if self._verify:
            for table in row.tables:
                for block_id in table:
                    self._release_block(block_id)

    def _release_block(self, block_id: int) -> None:
        if block_id != NULL_BLOCK:
            self._owners[block_id] -= 1

    def _drop_outside_window(self, row: _Row, group: int, start: int) -> None:
        """Blocks that no position from `start` on reads may serve someone else, said or unsaid."""
        table = row.tables[group]
        for index in range(min(first_read(self._group(group), start), len(table))):
            self._release_block(table[index])
            table[index] = NULL_BLOCK

    def _check_read(self, seq_id: int, row: _Row, group: int, start: int) -> None:
        found = self._group(group)
        for index, block_id in enumerate(row.tables[group][: -(-start // found.block_size)]):
            if block_id == NULL_BLOCK:
                given_up = index < first_read(found, start)
                _require(given_up, f"sequence {seq_id} reads block {index}, which it gave up")
                continue
            expected = [value ^ group for value in read_by(found, row.chain, start, index)]
            _require(
                self._block(block_id)[: len(expected)] == expected,
                f"sequence {seq_id} reads block {block_id} (its number {index}), which holds other tokens",
            )

    def _write(self, seq_id: int, row: _Row, group: int, start: int, end: int) -> None:
        found, table = self._group(group), row.tables[group]
        _require(end <= len(table) * found.block_size, f"sequence {seq_id} has {len(table)} blocks for {end} tokens")
        for index, slot, content in written_by(found, row.chain, start, end):
            block_id = table[index]
            _require(block_id != NULL_BLOCK, f"sequence {seq_id} writes to the null block")
            _require(self._owners[block_id] == 1, f"sequence {seq_id} writes to shared block {block_id}")
            self._block(block_id)[slot] = content ^ group
