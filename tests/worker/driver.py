"""A scheduler of a few lines, for tests: it makes real plans by hand and applies their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from quire.sampling_params import SamplingParams
from quire.step import NewSequence, SequenceFork, SequenceSampling, StepPlan, StepResult, TokenLogprobs

Execute = Callable[[StepPlan], Future[StepResult]]


def sampling_of(params: SamplingParams, seed: int = 0) -> SequenceSampling:
    return SequenceSampling(params, seed, [], [])


GREEDY = sampling_of(SamplingParams(temperature=0))


@dataclass
class Tracked:
    """What the driver knows: `length` counts tokens that are known or sampled by a plan in flight."""

    tokens: list[int]
    num_prompt: int
    sampling: SequenceSampling
    length: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    has_row: bool = False
    shares_last_block: bool = False
    pooling: bool = False
    vector: list[float] | None = None
    """Of a pooled sequence, once its prompt is computed."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Driver:
    """`submit` starts a plan that computes the given numbers of tokens; `apply` takes the oldest result in."""

    def __init__(self, execute: Execute, *, block_size: int = 16, num_blocks: int = 200) -> None:
        self._execute = execute
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, 0, -1))
        self._step_id = 0
        self._released: list[int] = []
        self._in_flight: list[tuple[StepPlan, Future[StepResult]]] = []
        self.sequences: dict[int, Tracked] = {}
        self.plans: list[StepPlan] = []

    def add(
        self,
        seq_id: int,
        prompt: Sequence[int],
        sampling: SequenceSampling = GREEDY,
        output: Sequence[int] = (),
        prefix: Sequence[int] = (),
        *,
        pooling: bool = False,
    ) -> None:
        """output: what it had generated before a preemption. prefix: full blocks that hold its first tokens."""
        tokens = [*prompt, *output]
        computed = len(prefix) * self._block_size
        self.sequences[seq_id] = Tracked(tokens, len(prompt), sampling, len(tokens), computed, list(prefix))
        self.sequences[seq_id].pooling = pooling

    def release(self, seq_id: int) -> Tracked:
        """Finished, aborted or preempted: the row goes with the next plan, the blocks are free for it."""
        sequence = self.sequences.pop(seq_id)
        self._released.append(seq_id)
        self._free += [block for block in sequence.blocks if not self._is_used(block)]
        return sequence

    def submit(self, work: Mapping[int, int], forks: Sequence[SequenceFork] = ()) -> StepPlan:
        """work: sequence -> tokens to compute. Sequences that reach their length are sampled, as are new children."""
        ids = list(work)
        plan = StepPlan(
            step_id=self._step_id,
            seq_ids=ids,
            start_positions=[self.sequences[seq_id].computed for seq_id in ids],
            num_tokens=list(work.values()),
            sample_seq_ids=[],
            sample_from=[],
            released=self._released,
        )
        self._released = []
        self._step_id += 1
        for index, (seq_id, count) in enumerate(work.items()):
            sequence = self.sequences[seq_id]
            self._grow(plan, seq_id, sequence, count)
            sequence.computed += count
            if sequence.computed == sequence.length:
                plan.sample_seq_ids.append(seq_id)
                plan.sample_from.append(index)
        for fork in forks:
            self._fork(plan, fork, ids)
        for index, seq_id in enumerate(plan.sample_seq_ids):
            if self.sequences[seq_id].pooling:
                plan.pooled.append(index)
            else:
                self.sequences[seq_id].length += 1
        self.plans.append(plan)
        self._in_flight.append((plan, self._execute(plan)))
        return plan

    def apply(self) -> StepResult:
        plan, future = self._in_flight.pop(0)
        result = future.result()
        assert result.step_id == plan.step_id
        for index, (seq_id, tokens) in enumerate(zip(plan.sample_seq_ids, result.token_ids, strict=True)):
            if seq_id in self.sequences:
                self.sequences[seq_id].tokens.extend(tokens)
                self.sequences[seq_id].vector = result.pooled.get(index)
                if index in result.logprobs:
                    self.sequences[seq_id].logprobs.extend(result.logprobs[index])
        for seq_id, found in result.prompt_logprobs.items():
            entries = self.sequences[seq_id].prompt_logprobs
            assert found.start == len(entries) + 1
            entries += found.entries
        return result

    def step(self, work: Mapping[int, int], forks: Sequence[SequenceFork] = ()) -> StepResult:
        self.submit(work, forks)
        return self.apply()

    def decode(self, num_steps: int, seq_ids: Sequence[int] | None = None) -> None:
        """Compute what is missing of all (or these) sequences, then one token a step."""
        for _ in range(num_steps):
            ids = list(self.sequences) if seq_ids is None else seq_ids
            self.step({s: self.sequences[s].length - self.sequences[s].computed for s in ids})

    def _grow(self, plan: StepPlan, seq_id: int, sequence: Tracked, count: int) -> None:
        num_blocks = -(-(sequence.computed + count) // self._block_size)
        fresh = [self._free.pop() for _ in range(num_blocks - len(sequence.blocks))]
        if sequence.shares_last_block:
            index, copy = sequence.computed // self._block_size, self._free.pop()
            plan.block_copies.append((sequence.blocks[index], copy))
            plan.replaced_blocks.append((seq_id, 0, index, copy))
            sequence.blocks[index] = copy
            sequence.shares_last_block = False
        sequence.blocks += fresh
        if not sequence.has_row:
            tokens, blocks = list(sequence.tokens), [list(sequence.blocks)]
            plan.new_sequences.append(NewSequence(seq_id, tokens, sequence.num_prompt, blocks, sequence.sampling))
            sequence.has_row = True
        elif fresh:
            plan.new_blocks[seq_id] = [fresh]

    def _fork(self, plan: StepPlan, fork: SequenceFork, ids: list[int]) -> None:
        parent = self.sequences[fork.parent]
        tokens = parent.tokens if fork.token_ids is None else fork.token_ids
        partly_filled = parent.computed % self._block_size != 0
        child = Tracked(list(tokens), parent.num_prompt, fork.sampling, len(tokens), parent.computed)
        child.blocks, child.has_row, child.shares_last_block = list(parent.blocks), True, partly_filled
        self.sequences[fork.child] = child
        plan.forks.append(fork)
        if fork.token_ids is None:
            plan.sample_seq_ids.append(fork.child)
            plan.sample_from.append(ids.index(fork.parent))

    def _is_used(self, block: int) -> bool:
        return any(block in sequence.blocks for sequence in self.sequences.values())
