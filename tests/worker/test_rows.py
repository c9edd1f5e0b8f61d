"""Rows, block tables and the gathered batch."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kv_cache.layout import NULL_BLOCK
from quire.sampling.parameters import SamplingRows
from quire.sampling_params import SamplingParams
from quire.step import StepPlan
from quire.worker.block_tables import BlockTables, TableShape
from quire.worker.columns import ColumnValues
from quire.worker.input_batch import InputBatch, build_input_batch
from quire.worker.platform.cpu_inputs import CpuColumns, prepare_inputs
from quire.worker.request_state import RequestState
from quire.worker.sample_rows import build_sample_rows
from tests.worker.driver import GREEDY, sampling_of

NO_VALUES = ColumnValues((), (), 0)
RICH = sampling_of(SamplingParams(logit_bias={1: 2.0}, allowed_token_ids=[1, 2], prompt_logprobs=1))


def request_state(num_rows: int, max_model_len: int, num_groups: int = 1) -> tuple[RequestState, CpuColumns]:
    """That of a CPU, with blocks of 4 tokens."""
    columns = CpuColumns(num_rows, max_model_len, NO_VALUES)
    tables = BlockTables([TableShape(4)] * num_groups, num_rows, max_model_len)
    return RequestState(tables, SamplingRows(num_rows), columns), columns


def test_rows_do_not_degrade_as_requests_come_and_go() -> None:
    """20,000 sequences through 8 rows: always the lowest free row, nothing kept of those that left."""
    rng = np.random.default_rng(0)
    rows, _ = request_state(8, max_model_len=32)
    shapes = {name: array.shape for name, array in vars(rows.sampling).items() if isinstance(array, np.ndarray)}
    live: dict[int, int] = {}
    for seq_id in range(20_000):
        if len(live) == 8 or (live and rng.random() < 0.4):
            gone = int(rng.choice(list(live)))
            assert rows.release(gone) == live.pop(gone)
        row = rows.add_request(seq_id, [seq_id % 97] * 3, 3, RICH if seq_id % 2 else GREEDY)
        assert row == min(set(range(8)) - set(live.values()))
        live[seq_id] = row
    assert rows.rows_of(list(live)).tolist() == list(live.values())
    version = rows.rows_version
    assert rows.rows_of(list(live)).tolist() == list(live.values())
    assert rows.rows_version == version, "the same rows"
    for seq_id in list(live):
        rows.release(seq_id)
        assert seq_id not in rows
    assert len(rows) == len(rows.lengths) == 0
    sampling = rows.sampling
    assert not sampling.rows_with_prompt_logprobs
    assert not any(sampling.lists.spans(kind, np.arange(8))[1].any() for kind in range(4))
    assert {n: a.shape for n, a in vars(sampling).items() if isinstance(a, np.ndarray)} == shapes


def test_tokens_of_another_stage() -> None:
    """Two accepted drafts of three, and one token more; forced ones follow these."""
    rows, columns = request_state(2, max_model_len=32)
    row = rows.add_request(5, [1, 2, 3], 3, GREEDY)
    rows.lengths[5] = 7
    rows.update(StepPlan(1, [], [], [], [], [], sampled=[(5, 3, [4, 6, 8])], appended={5: [9]}))
    assert columns.token_ids[row, :7].tolist() == [1, 2, 3, 4, 6, 8, 9]
    assert rows.lengths[5] == 7
    rows.update(StepPlan(2, [], [], [], [], [], sampled=[(5, 7, [1])], released=[5]))
    assert 5 not in rows


def test_the_token_table_is_not_touched_before_it_is_used() -> None:
    """8 GiB of table: only the touched rows exist."""
    rows, columns = request_state(1024, max_model_len=2**21)
    rows.add_request(5, [1, 2, 3], 2, GREEDY)
    sampled = build_sample_rows([5], [0], build_input_batch([5], [0], [3], rows), rows)
    columns.write_tokens(int(sampled.rows[0]), int(sampled.lengths[0]), [9])
    assert columns.token_ids[0, :5].tolist() == [1, 2, 3, 9, 0]
    assert rows.lengths == {5: 4}


def test_misuse_of_rows_is_a_bug_that_shows() -> None:
    rows, _ = request_state(1, max_model_len=4)
    rows.add_request(1, [1], 1, GREEDY)
    with pytest.raises(AssertionError, match="sequence 1 has a row already"):
        rows.add_request(1, [1], 1, GREEDY)
    with pytest.raises(AssertionError, match="no free row for sequence 2"):
        rows.add_request(2, [1], 1, GREEDY)
    with pytest.raises(KeyError):
        rows.release(2)


def test_tables_of_groups_with_block_sizes_of_their_own() -> None:
    tables = BlockTables([TableShape(16), TableShape(64)], num_rows=2, max_model_len=127)
    tables.append(0, [[1, 2, 3, 4, 5], [6, 7]])
    tables.append(1, [[8], [9]])
    rows = np.array([0, 1])
    assert [table.shape for table in tables.gather(rows, 65)] == [(2, 5), (2, 2)]
    assert tables.gather(rows, 65)[1].tolist() == [[6, 7], [9, NULL_BLOCK]]
    assert tables.written(rows, np.array([60, 3]), np.array([66, 4])) == [4, 5, 6, 7, 8, 9]
    batch = InputBatch.of(rows, starts=np.array([60, 3]), counts=np.array([6, 1]))
    _, attention = prepare_inputs(batch, np.zeros((2, 128), np.int32), tables)
    assert [slots[[0, 5, 6]].tolist() for slots in attention.slot_mapping] == [
        [4 * 16 + 12, 5 * 16 + 1, 8 * 16 + 3],
        [6 * 64 + 60, 7 * 64 + 1, 9 * 64 + 3],
    ]


def test_block_tables_of_two_groups() -> None:
    tables = BlockTables([TableShape(16)] * 2, num_rows=3, max_model_len=63)
    tables.append(0, [[5, 6], [7]])
    tables.append(0, [[8], [9, 10]])
    tables.replace(0, group=1, logical_index=1, block_id=11)
    tables.copy(0, 2)
    tables.append(2, [[12], []])
    tables.clear(0)
    assert [table.tolist() for table in tables.gather(np.array([2, 0]), 64)] == [
        [[5, 6, 8, 12], [NULL_BLOCK] * 4],
        [[7, 11, 10, NULL_BLOCK], [NULL_BLOCK] * 4],
    ]
    assert tables.gather(np.array([2]), 17)[0].tolist() == [[5, 6]]
    with pytest.raises(AssertionError, match="exists"):
        tables.replace(2, group=1, logical_index=3, block_id=1)


def test_the_batch_against_a_loop_over_tokens() -> None:
    """Random rows, starts and counts, two groups, against the same thing written token by token."""
    rng = np.random.default_rng(1)
    block_size = 4
    rows, columns = request_state(6, max_model_len=64, num_groups=2)
    for seq_id in range(6):
        sampling = RICH if seq_id % 3 == 0 else GREEDY
        row = rows.add_request(seq_id, rng.integers(0, 1000, 60).tolist(), 30, sampling)
        rows.append_blocks(row, [rng.integers(1, 500, 15).tolist() for _ in range(2)])
    for _ in range(20):
        seq_ids = rng.permutation(6)[: int(rng.integers(1, 7))].tolist()
        starts = rng.integers(0, 50, len(seq_ids)).tolist()
        counts = rng.integers(1, 10, len(seq_ids)).tolist()
        batch = build_input_batch(seq_ids, starts, counts, rows)
        token_ids, attention = prepare_inputs(batch, columns.token_ids, rows.tables)
        tokens = [
            (index, row, position)
            for index, (row, start, count) in enumerate(zip(batch.rows, starts, counts, strict=True))
            for position in range(start, start + count)
        ]
        assert token_ids.tolist() == [columns.token_ids[row, position] for _, row, position in tokens]
        assert attention.slot_positions.tolist() == [position for _, _, position in tokens]
        assert attention.sequence_index.tolist() == [index for index, _, _ in tokens]
        assert attention.query_start.tolist() == [0, *np.cumsum(counts).tolist()]
        assert batch.query_start[:-1].tolist() == (np.cumsum(counts) - counts).tolist()
        assert (batch.counts.tolist(), batch.num_tokens) == (counts, len(tokens))
        assert batch.ends.tolist() == [start + count for start, count in zip(starts, counts, strict=True)]
        for group in range(2):
            table = rows.tables._tables[group]
            slots = [table[row, p // block_size] * block_size + p % block_size for _, row, p in tokens]
            assert attention.slot_mapping[group].tolist() == slots
            width = -(-max(batch.ends.tolist()) // block_size)
            assert attention.block_tables[group].tolist() == table[batch.rows, :width].tolist()
        assert token_ids.dtype == attention.slot_mapping[0].dtype == attention.slot_positions.dtype
        assert str(token_ids.dtype) == "torch.int64"
        assert str(attention.block_tables[0].dtype) == "torch.int32"
        sampled = build_sample_rows(seq_ids[::-1], list(range(len(seq_ids)))[::-1], batch, rows)
        read = np.arange(len(tokens)) if batch.logits_rows is None else batch.logits_rows
        ends = np.cumsum(counts)
        assert read[sampled.last_index].tolist() == (ends - 1).tolist()[::-1]
        scored = [index for index, seq_id in enumerate(seq_ids) if seq_id % 3 == 0]
        assert read[batch.read_start[scored]].tolist() == (ends - counts)[scored].tolist()
        assert len(read) == sum(counts[index] if index in scored else 1 for index in range(len(counts)))
        assert sampled.lengths.tolist() == batch.ends.tolist()[::-1]
        in_order, first_only = list(range(len(seq_ids))), [0] * len(seq_ids)
        for sources in (in_order, in_order[::-1], first_only, in_order[:-1]):
            sampled = build_sample_rows([seq_ids[index] for index in sources], sources, batch, rows)
            assert sampled.are_read_rows == (read[sampled.last_index].tolist() == read.tolist())
            assert sampled.lengths.tolist() == batch.ends[sources].tolist()
        assert [rows.lengths[seq_id] for seq_id in seq_ids] == (batch.ends + 1).tolist()
        rows.lengths.update(dict.fromkeys(range(6), 60))


def test_rows_of_the_same_sequences_are_found_anew_when_a_row_has_changed_hands() -> None:
    """Beams: a child may have the id of a sequence that the same plan releases."""
    rows, _ = request_state(3, max_model_len=4)
    for seq_id in (5, 6):
        rows.add_request(seq_id, [1], 1, GREEDY)
    before, version = rows.rows_of([6]), rows.rows_version
    assert before.tolist() == [1]
    rows.release(5)
    rows.release(6)
    rows.add_request(6, [1], 1, GREEDY)
    assert rows.rows_of([6]).tolist() == [0]
    assert rows.rows_version != version
    assert before.tolist() == [1]
    assert rows.rows_of([]).tolist() == []
