"""The input batch of one step: gathered from the request state, frozen, without a Python loop over sequences or
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.interface import AttentionBatch
from quire.worker.block_tables import BlockTables
from quire.worker.request_state import RequestState


@dataclass(frozen=True, slots=True)
class InputBatch:
    """S scheduled sequences with T tokens in all, in the plan's order.

    rows: [S] int64. starts, ends: [S] int64, first position computed in this step and the one after the last.
    first_index, last_index: [S] int64, where the sequence's first and last token lie among the T.
    token_ids, positions: [T] int64 tensors.
    """

    rows: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    first_index: np.ndarray
    last_index: np.ndarray
    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch


def build_input_batch(
    rows: np.ndarray,
    start_positions: Sequence[int],
    num_tokens: Sequence[int],
    requests: RequestState,
    tables: BlockTables,
) -> InputBatch:
    """rows: [S] int64, S >= 1. Every scheduled token must be known: those that an earlier step sampled are."""
    starts = np.array(start_positions, np.int64)
    counts = np.array(num_tokens, np.int64)
    ends = starts + counts
    assert (ends <= requests.lengths[rows]).all(), "the plan schedules a token that no step has sampled"
    query_start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=query_start[1:])
    sequence_index = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[sequence_index]
    token_ids = requests.token_ids[rows[sequence_index], positions].astype(np.int64)
    block_tables = tables.gather(rows, int(ends.max()))
    attention = build_attention_batch(query_start, starts, positions, sequence_index, block_tables, tables.block_sizes)
    return InputBatch(
        rows=rows,
        starts=starts,
        ends=ends,
        first_index=query_start[:-1],
        last_index=query_start[1:] - 1,
        token_ids=torch.from_numpy(token_ids),
        positions=attention.positions,
        attention=attention,
    )


def build_attention_batch(
    query_start: np.ndarray,
    start_positions: np.ndarray,
    positions: np.ndarray,
    sequence_index: np.ndarray,
    block_tables: tuple[np.ndarray, ...],
    block_sizes: Sequence[int],
) -> AttentionBatch:
    """Compute the slot mapping and wrap everything as tensors (shapes: AttentionBatch). block_sizes: per KV group."""
    places = {size: np.divmod(positions, size) for size in set(block_sizes)}
    slots = (
        table[sequence_index, places[size][0]].astype(np.int64) * size + places[size][1]
        for table, size in zip(block_tables, block_sizes, strict=True)
    )
    return AttentionBatch(
        query_start=torch.from_numpy(query_start),
        start_positions=torch.from_numpy(start_positions),
        positions=torch.from_numpy(positions),
        sequence_index=torch.from_numpy(sequence_index),
        block_tables=tuple(torch.from_numpy(table) for table in block_tables),
        slot_mapping=tuple(torch.from_numpy(slot) for slot in slots),
    )
