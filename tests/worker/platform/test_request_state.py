"""Random plans against a model of the rows in plain Python: what the device holds, and the inputs it prepares."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.kernels.triton.rows import StepColumns
from quire.sampling_params import SamplingParams
from quire.step import NewSequence, SequenceFork, SequenceSampling, StepPlan, TokenValues
from quire.worker.block_tables import BlockTables, TableShape
from quire.worker.columns import Column, ColumnValues, Rule
from quire.worker.input_batch import build_input_batch
from quire.worker.platform.device_inputs import DeviceInputs, add_columns
from quire.worker.platform.device_step import StagedColumns
from quire.worker.platform.state_arena import StateArena
from quire.worker.platform.streams import make_streams
from quire.worker.platform.upload import RowWrites, Upload
from quire.worker.request_state import RequestState
from tests.worker.driver import sampling_of

NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_GROUPS = 7, 60, 4, 2
PARAMETERS = 3
TABLE = [Column(rule.name, rule) for rule in Rule]
GREEDY = sampling_of(SamplingParams(temperature=0))


class SamplingRows:
    """Of each row the words are zero, the seed and its complement; forgets nothing."""

    rows_with_prompt_logprobs: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._seeds: dict[int, int] = {}

    def set(self, row: int, sampling: SequenceSampling) -> None:
        self._seeds[row] = sampling.seed

    def words(self, row: int) -> np.ndarray:
        return np.array([0, self._seeds[row], ~self._seeds[row]], np.int32)

    def clear(self, row: int) -> None:
        """Nothing beyond the row."""


@dataclass
class Expected:
    """A sequence as `quire.step` says it is. known: tokens computed or sampled."""

    tokens: list[int]
    num_prompt: int
    blocks: list[list[int]]
    seed: int
    computed: int = 0
    columns: dict[str, int] = field(default_factory=dict)
    lists: dict[str, TokenValues] = field(default_factory=dict)


@dataclass
class World:
    """Makes random plans and applies them, in the order of effects that `quire.step` documents."""

    rng: random.Random
    sequences: dict[int, Expected] = field(default_factory=dict)
    next_id: int = 0

    def token(self) -> int:
        return self.rng.randrange(1, 10_000)

    def block(self) -> int:
        return self.rng.randrange(1, 500)

    def plan(self, step_id: int) -> StepPlan:
        rng, live = self.rng, list(self.sequences)
        released = rng.sample(live, min(len(live), rng.choice([0, 0, 1, 2])))
        for seq_id in released:
            del self.sequences[seq_id]
        room = NUM_ROWS - len(self.sequences)
        plan = StepPlan(step_id, [], [], [], [], [], released=released)
        before = list(self.sequences)
        for _ in range(rng.randint(0, min(room, 2))):
            self._arrive(plan)
            room -= 1
        for _ in range(rng.randint(0, min(room, 2)) if before else 0):
            self._branch(plan, rng.choice(before))
            room -= 1
        for seq_id, sequence in self.sequences.items():
            if rng.random() < 0.2 and sequence.computed < len(sequence.tokens):
                sequence.tokens[-1] = self.token()
                plan.token_overrides.append((seq_id, sequence.tokens[-1]))
            elif rng.random() < 0.1:
                plan.appended[seq_id] = [self.token() for _ in range(rng.randint(1, 4))]
                sequence.tokens += plan.appended[seq_id]
        self._schedule(plan)
        for _ in range(rng.randint(0, min(room, 3)) if plan.seq_ids else 0):
            self._fork(plan)
        return plan

    def _arrive(self, plan: StepPlan) -> None:
        tokens = [self.token() for _ in range(self.rng.randint(1, 30))]
        num_blocks = -(-len(tokens) // BLOCK_SIZE)
        blocks = [[self.block() for _ in range(num_blocks)] for _ in range(NUM_GROUPS)]
        columns = {column.name: self.rng.randrange(20) for column in TABLE if self.rng.random() < 0.7}
        listed = TABLE if self.rng.random() < 0.5 else []
        lists = {
            column.name: TokenValues(self.rng.randrange(5), [self.token() for _ in tokens[: self.rng.randint(1, 20)]])
            for column in listed
        }
        num_prompt = self.rng.randint(1, len(tokens))
        seq_id = self._add(Expected(tokens, num_prompt, blocks, self.token(), columns=columns, lists=lists))
        sampling = sampling_of(GREEDY.params, self.sequences[seq_id].seed)
        new = NewSequence(seq_id, list(tokens), num_prompt, list(map(list, blocks)), sampling, columns, lists)
        plan.new_sequences.append(new)

    def _add(self, sequence: Expected) -> int:
        seq_id, self.next_id = self.next_id, self.next_id + 1
        self.sequences[seq_id] = sequence
        return seq_id

    def _child(self, parent: Expected, tokens: list[int]) -> int:
        blocks = [list(table) for table in parent.blocks]
        computed = min(parent.computed, len(tokens))
        return self._add(
            Expected(tokens, parent.num_prompt, blocks, self.token(), computed, parent.columns, parent.lists)
        )

    def _branch(self, plan: StepPlan, parent: int) -> None:
        child = self._child(self.sequences[parent], list(self.sequences[parent].tokens))
        plan.beam_reorders.append(SequenceFork(parent, child, sampling_of(GREEDY.params, self.sequences[child].seed)))

    def _schedule(self, plan: StepPlan) -> None:
        """Some sequences compute some of what they know; tables grow, entries change; those at their end sample."""
        rng = self.rng
        for seq_id in rng.sample(list(self.sequences), len(self.sequences)):
            sequence = self.sequences[seq_id]
            missing = len(sequence.tokens) - sequence.computed
            if not missing or len(sequence.tokens) >= MAX_MODEL_LEN - 2 or rng.random() < 0.2:
                continue
            count = rng.randint(1, missing)
            plan.seq_ids.append(seq_id)
            plan.start_positions.append(sequence.computed)
            plan.num_tokens.append(count)
            sequence.computed += count
            missing_blocks = -(-sequence.computed // BLOCK_SIZE) - len(sequence.blocks[0])
            if missing_blocks > 0:
                new = [[self.block() for _ in range(missing_blocks)] for _ in range(NUM_GROUPS)]
                plan.new_blocks[seq_id] = new
                sequence.blocks = [old + more for old, more in zip(sequence.blocks, new, strict=True)]
            elif rng.random() < 0.3 and not any(new.seq_id == seq_id for new in plan.new_sequences):
                group, index = rng.randrange(NUM_GROUPS), rng.randrange(len(sequence.blocks[0]))
                sequence.blocks[group][index] = self.block()
                plan.replaced_blocks.append((seq_id, group, index, sequence.blocks[group][index]))
            if sequence.computed == len(sequence.tokens):
                plan.sample_seq_ids.append(seq_id)
                plan.sample_from.append(len(plan.seq_ids) - 1)

    def _fork(self, plan: StepPlan) -> None:
        """Off a scheduled sequence: sampled with it, with a history of its own, or with all its tokens."""
        index = self.rng.randrange(len(plan.seq_ids))
        parent = plan.seq_ids[index]
        sequence = self.sequences[parent]
        kind = self.rng.choice(["sampled", "history", "copy"])
        tokens = list(sequence.tokens[: sequence.computed] if kind == "sampled" else sequence.tokens)
        if kind == "history":
            tokens = tokens[: sequence.computed] + [self.token() for _ in range(3)]
        child = self._child(sequence, tokens)
        history = list(tokens) if kind == "history" else None
        plan.forks.append(SequenceFork(parent, child, sampling_of(GREEDY.params, self.sequences[child].seed), history))
        if kind == "sampled":
            plan.sample_seq_ids.append(child)
            plan.sample_from.append(index)


class Rows:
    """The parts of a runner that keep rows."""

    def __init__(self, device: torch.device) -> None:
        values = ColumnValues(TABLE, [column.name for column in TABLE], NUM_ROWS)
        shapes = [TableShape(BLOCK_SIZE)] * NUM_GROUPS
        self.arena = StateArena(NUM_ROWS, MAX_MODEL_LEN, shapes, PARAMETERS, device, values.rules)
        tables = BlockTables(shapes, NUM_ROWS, MAX_MODEL_LEN)
        sampling = SamplingRows()
        self.columns = StagedColumns(self.arena, sampling, values)  # type: ignore[arg-type]
        self.requests = RequestState(tables, sampling, self.columns)  # type: ignore[arg-type]
        self.upload = Upload(make_streams(device), 2)
        self.inputs = DeviceInputs(self.arena, BLOCK_SIZE, NUM_ROWS + 1, 400, values.names)
        self.writes = RowWrites()

    def run(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        self.requests.update(plan)
        self.writes = self.columns.take_writes()
        self.upload.begin()
        self.writes.add_to(self.upload)
        columns = build_input_batch(plan.seq_ids, plan.start_positions, plan.num_tokens, self.requests)
        sections = add_columns(columns, self.upload, self.columns.values)
        self.upload.send()
        self.writes.apply(self.upload, self.arena.words)
        on_device = StepColumns(*map(self.upload.view, sections))
        return columns, self.inputs.prepare(columns, on_device, len(columns.rows) + 1, columns.num_tokens + 3)

    def sample(self, plan: StepPlan, tokens: list[int]) -> None:
        """What the sampler's last kernel does."""
        for seq_id, index, token in zip(plan.sample_seq_ids, plan.sample_from, tokens, strict=True):
            row = int(self.requests.rows_of([seq_id])[0])
            position = plan.start_positions[index] + plan.num_tokens[index]
            self.arena.token_ids[row, position] = token
            self.requests.lengths[seq_id] = position + 1

    def check(self, sequences: dict[int, Expected]) -> None:
        assert len(self.requests) == len(sequences)
        rows = self.requests.rows_of(list(sequences))
        assert len(set(rows.tolist())) == len(sequences)
        for row, (seq_id, sequence) in zip(rows.tolist(), sequences.items(), strict=True):
            length = self.requests.lengths[seq_id]
            assert self.arena.token_ids[row, :length].tolist() == sequence.tokens, seq_id
            assert self.requests.num_prompt_tokens[row] == sequence.num_prompt
            assert self.requests.tables.num_entries(row) == [len(table) for table in sequence.blocks]
            for table, blocks in zip(self.arena.block_tables, sequence.blocks, strict=True):
                assert table[row, : len(blocks)].tolist() == blocks, seq_id
            assert self.arena.parameters[row].tolist() == [0, sequence.seed, ~sequence.seed]


@pytest.mark.parametrize("seed", range(2))
def test_random_plans(seed: int, device: torch.device) -> None:
    world, rows = World(random.Random(seed)), Rows(device)
    seen = {
        "beam_reorders": 0,
        "forks": 0,
        "token_overrides": 0,
        "appended": 0,
        "replaced_blocks": 0,
        "new_blocks": 0,
        "released": 0,
    }
    for step in range(30):
        plan = world.plan(step)
        columns, (batch, (token_ids, others, *_)) = rows.run(plan)
        for name in seen:
            seen[name] += len(getattr(plan, name))
        places = [
            (seq_id, start + i)
            for seq_id, start, count in zip(plan.seq_ids, plan.start_positions, plan.num_tokens, strict=True)
            for i in range(count)
        ]
        assert token_ids.tolist() == [*(world.sequences[s].tokens[at] for s, at in places), 0, 0, 0]
        assert batch.slot_positions.tolist() == [*(at for _, at in places), 0, 0, 0]
        for name, found in others.items():
            rule = Rule[name]
            lists = [world.sequences[s].lists.get(name, TokenValues(0, [])) for s, _ in places]
            values = [
                world.sequences[s].columns.get(name, 0) if at >= own.end else 0
                for own, (s, at) in zip(lists, places, strict=True)
            ]
            wanted = [
                value if rule == Rule.ROW else at + value if rule == Rule.SHIFTED else int(0 < value <= at)
                for value, (_, at) in zip(values, places, strict=True)
            ]
            listed = zip(lists, wanted, places, strict=True)
            wanted = [
                own.values[at - own.start] if own.start <= at < own.end else value for own, value, (_, at) in listed
            ]
            assert found.tolist() == [*wanted, 0, 0, 0], name
        for group in range(NUM_GROUPS):
            tables = {seq_id: world.sequences[seq_id].blocks[group] for seq_id in plan.seq_ids}
            slots = [tables[s][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for s, at in places]
            assert batch.slot_mapping[group].tolist() == [*slots, -1, -1, -1]
        ends = [start + count for start, count in zip(plan.start_positions, plan.num_tokens, strict=True)]
        assert batch.seq_lens.tolist() == [*ends, 0]
        assert batch.max_seq_len == max(ends, default=0)
        assert batch.max_query_len == max(plan.num_tokens, default=0)
        assert columns.num_tokens == len(places)
        tokens = [world.token() for _ in plan.sample_seq_ids]
        rows.sample(plan, tokens)
        for seq_id, token in zip(plan.sample_seq_ids, tokens, strict=True):
            world.sequences[seq_id].tokens.append(token)
        rows.check(world.sequences)
    assert min(seen.values()) > 3, seen


def test_what_graphs_read_stays_where_it_is_and_is_no_upload(device: torch.device) -> None:
    """A CUDA graph replays from the addresses of its capture; uploads take turns between two buffers."""
    rows = Rows(device)
    new = NewSequence(5, [1, 2, 3, 4], 4, [[1], [2]], GREEDY)
    plans = [StepPlan(0, [5], [0], [1], [], [], new_sequences=[new])]
    plans += [StepPlan(step, [5], [step], [1], [], []) for step in (1, 2)]
    addresses, uploads = [], set()
    for plan in plans:
        _, (batch, (token_ids, others, *_)) = rows.run(plan)
        inputs = [batch.rows, batch.query_start, batch.seq_lens, batch.slot_positions, *batch.slot_mapping, token_ids]
        inputs += others.values()
        addresses.append([tensor.data_ptr() for tensor in (*inputs, *batch.block_tables)])
        memories = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        uploads |= {buffer.untyped_storage().data_ptr() for buffer in rows.upload._devices}
        assert memories.isdisjoint(uploads)
    assert addresses[0] == addresses[1] == addresses[2]
    assert len(uploads) == 2


def test_a_plain_decode_step_sends_no_writes(device: torch.device) -> None:
    rows = Rows(device)
    blocks = [[1], [2]]
    rows.run(StepPlan(0, [5], [0], [2], [5], [0], new_sequences=[NewSequence(5, [1, 2], 2, blocks, GREEDY)]))
    rows.sample(StepPlan(0, [5], [0], [2], [5], [0]), [3])
    _, (_, (token_ids, *_)) = rows.run(StepPlan(1, [5], [2], [1], [5], [0]))
    assert [(s.destinations, s.values, s.copies) for s in rows.writes._sections] == [(None, None, None)]
    assert token_ids[0] == 3


def test_a_token_that_was_not_sampled_is_a_bug_that_shows(device: torch.device) -> None:
    rows = Rows(device)
    new = NewSequence(5, [1, 2], 2, [[1], [2]], GREEDY)
    with pytest.raises(AssertionError, match="no step has sampled"):
        rows.run(StepPlan(0, [5], [1], [2], [], [], new_sequences=[new]))


def test_tables_that_cannot_be_addressed() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs=4096 sequences of max_model_len=1000000"):
        StateArena(4096, 1_000_000, [TableShape(16)], 32, torch.device("cpu"))
