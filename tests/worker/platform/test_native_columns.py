"""Steps that are gathered natively, against the same in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attention.interface import AttentionBatch, StateStep
from quire.attention.native_backend import NativeAttention, NativeAttentionStep
from quire.attention.states import StateBackend
from quire.kernels.cpu.runtime import NativeRuntime
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec, LayerSpec, SlidingWindowSpec, StateSpec
from quire.step import TokenValues
from quire.worker.block_tables import BlockTables, table_shapes
from quire.worker.columns import Column, ColumnValues, Rule
from quire.worker.input_batch import InputBatch
from quire.worker.kv_tensors import allocate_pages, state_pages
from quire.worker.platform.cpu_inputs import CacheBackends, PlainInputs
from quire.worker.platform.native_columns import FIRST_CAPACITY, NativeColumns

NUM_ROWS, MAX_MODEL_LEN, NUM_BLOCKS = 5, 300, 40
FULL, WINDOWED = AttentionSpec(2, 8, 8, 4), SlidingWindowSpec(2, 8, 8, 4, window=20)
RUNTIME = NativeRuntime("auto", 2)
TABLE = [Column(rule.name, rule) for rule in Rule] + [Column("again", Rule.ROW)]


class World:
    """Rows of random tokens and blocks."""

    def __init__(self, specs: Sequence[LayerSpec], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        groups, layers_per_group = group_layers(specs, 16, 64)
        self.layout = KVCacheLayout(16, NUM_BLOCKS, groups, layers_per_group)
        self.pages = allocate_pages(self.layout)
        self.tables = BlockTables(table_shapes(self.layout), NUM_ROWS, MAX_MODEL_LEN)
        self.values = ColumnValues(TABLE, [column.name for column in TABLE], NUM_ROWS)
        self.columns = NativeColumns(NUM_ROWS, MAX_MODEL_LEN, self.values, None, self.tables, self.backends(), RUNTIME)
        self.plain = PlainInputs(self.columns, self.tables, self.backends())
        for row in range(NUM_ROWS):
            values = dict(zip(self.values.names, rng.integers(0, 200, 4).tolist(), strict=True))
            names = self.values.names[: row % 3]
            lists = {name: TokenValues(2 * row, rng.integers(0, 900, 30).tolist()) for name in names}
            self.columns.write_values(row, values, lists)
            self.columns.write_tokens(row, 0, rng.integers(0, 1000, MAX_MODEL_LEN).tolist())
            sizes = [-(-MAX_MODEL_LEN // group.block_size) for group in groups]
            self.tables.append(row, [rng.integers(1, NUM_BLOCKS, size).tolist() for size in sizes])

    def backends(self) -> CacheBackends:
        attention = NativeAttention(self.layout, self.pages, "float32", num_heads=2, num_threads=2)
        return CacheBackends(attention, StateBackend(self.layout, state_pages(self.pages, self.layout)))

    def check(self, rows: np.ndarray, starts: list[int], counts: list[int]) -> None:
        batch, expected = (
            self.columns.input_batch(rows, starts, counts, 0),
            InputBatch.of_plan(rows, starts, counts),
        )
        batch = batch._replace(rows_version=expected.rows_version)
        for column, wanted in zip(batch, expected, strict=True):
            if isinstance(column, int):
                continue
            assert (column is None) == (wanted is None)
            assert wanted is None or (column.dtype, column.tolist()) == (wanted.dtype, wanted.tolist())
        found = self.columns.forward_batch(batch, None)
        wanted = self.plain.forward_batch(expected, None)
        assert torch.equal(found.token_ids, wanted.token_ids)
        assert torch.equal(found.slot_positions, wanted.slot_positions)
        assert found.columns.keys() == wanted.columns.keys() == set(self.values.names)
        assert all(torch.equal(found.columns[name], wanted.columns[name]) for name in self.values.names)
        step, wanted_step = found.attention, wanted.attention
        assert isinstance(step, NativeAttentionStep)
        self._check_attention(step.batch, wanted_step.batch, expected.ends)
        sizes = [[(plan.num_items, plan.num_merges) for plan in each.plans] for each in (step, wanted_step)]
        assert sizes[0] == sizes[1]
        assert (found.states is None) == (wanted.states is None)
        if wanted.states is not None:
            assert isinstance(found.states, StateStep)
            assert found.states.query_start == wanted.states.query_start
            assert found.states.starts.tolist() == starts

    def _check_attention(self, found: AttentionBatch, wanted: AttentionBatch, ends: np.ndarray) -> None:
        for name in ("query_start", "start_positions", "slot_positions", "sequence_index"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name
        assert len(found.slot_mapping) == len(wanted.slot_mapping)
        assert all(map(torch.equal, found.slot_mapping, wanted.slot_mapping))
        shapes = self.tables.shapes
        sizes = [[shape.block_size for shape in shapes if shape.has_slots is kind] for kind in (True, False)]
        for kind, tables, others in zip(
            sizes, (found.block_tables, found.state_tables), (wanted.block_tables, wanted.state_tables), strict=True
        ):
            for size, table, other in zip(kind, tables, others, strict=True):
                for row, wanted_row, end in zip(table, other, ends, strict=True):
                    used = -(-int(end) // size)
                    assert torch.equal(row[:used], wanted_row[:used])


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[list[int], list[int], list[int]]]:
    """Rows, starts and counts; some are decodes that follow the step before."""
    found: list[tuple[list[int], list[int], list[int]]] = []
    for _ in range(draw(st.integers(1, 5))):
        if found and draw(st.booleans()):
            rows, starts, counts = found[-1]
            starts = [start + count for start, count in zip(starts, counts, strict=True)]
            if max(starts) < MAX_MODEL_LEN:
                found.append((rows, starts, [1] * len(rows)))
                continue
        rows = draw(st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, unique=True))
        starts = [draw(st.integers(0, MAX_MODEL_LEN - 1)) for _ in rows]
        counts = [draw(st.integers(1, MAX_MODEL_LEN + 1 - start)) for start in starts]
        found.append((rows, starts, counts))
    return found


@pytest.mark.parametrize(
    "specs",
    [(FULL,), (FULL, WINDOWED), (StateSpec(FULL.page_bytes(16) * 4), FULL, StateSpec(FULL.page_bytes(16) * 4))],
    ids=["one group", "a window", "states, and blocks of several kernel blocks"],
)
def test_the_same_as_in_numpy(specs: Sequence[LayerSpec]) -> None:
    world = World(specs)
    assert len(specs) < 3 or any(shape.kernel_blocks > 1 for shape in world.tables.shapes)

    @settings(max_examples=60)
    @given(steps())
    def check(found: list[tuple[list[int], list[int], list[int]]]) -> None:
        kept: dict[tuple[int, ...], np.ndarray] = {}
        for rows, starts, counts in found:
            world.check(kept.setdefault(tuple(rows), np.array(rows)), starts, counts)

    check()
    for counts in ([3, 70], [70, 3]):  # of one size
        world.check(np.arange(2), [0, 0], counts)
    num_tokens = [MAX_MODEL_LEN + 1] * NUM_ROWS
    assert sum(num_tokens) > FIRST_CAPACITY
    world.check(np.arange(NUM_ROWS), [0] * NUM_ROWS, num_tokens)


def test_steps_of_one_size_have_the_same_input() -> None:
    columns, rows = World([FULL]).columns, np.array([3, 1])
    first, second = (columns.forward_batch(columns.input_batch(rows, [start, 9], [1, 1], 1), None) for start in (5, 6))
    assert first is second
    assert first.slot_positions.tolist() == [6, 9]
    others = columns.forward_batch(columns.input_batch(rows, [6, 9], [2, 2], 1), None)
    assert others.version != first.version, "they lie elsewhere"
    read = columns.forward_batch(columns.input_batch(rows, [6, 9], [2, 2], 1), torch.tensor([1, 3]))
    assert read.version == 0, "the rows that are read may lie anywhere"


def test_rows_of_another_version_are_gathered_anew() -> None:
    """In the array that held the rows before: it is the version that counts, not the object."""
    columns, rows = World([FULL]).columns, np.array([3, 1])
    before = columns.forward_batch(columns.input_batch(rows, [5, 9], [1, 1], 1), None).token_ids.tolist()
    rows[:] = rows[::-1].copy()
    after = columns.forward_batch(columns.input_batch(rows, [9, 5], [1, 1], 2), None).token_ids.tolist()
    assert after == before[::-1]


@pytest.mark.parametrize(
    ("rows", "starts", "counts", "reason"),
    [
        ([NUM_ROWS], [0], [1], "slot that does not exist"),
        ([-1], [0], [1], "slot that does not exist"),
        ([0] * (NUM_ROWS + 1), [0] * (NUM_ROWS + 1), [1] * (NUM_ROWS + 1), "more sequences"),
        ([0], [0, 1], [1], "for each sequence"),
        ([0], [0], [0], "without tokens"),
        ([0], [-1], [1], "outside the token table"),
        ([0], [MAX_MODEL_LEN], [2], "outside the token table"),
        ([0], [2**62], [1], "outside the token table"),
        ([2], [30], [10], "not one of"),
    ],
)
def test_what_lies_outside_is_refused(rows: list[int], starts: list[int], counts: list[int], reason: str) -> None:
    world = World([FULL])
    world.tables.replace(2, group=0, logical_index=1, block_id=NUM_BLOCKS)
    with pytest.raises(ValueError, match=reason):
        world.columns.input_batch(np.array(rows), starts, counts, 0)
