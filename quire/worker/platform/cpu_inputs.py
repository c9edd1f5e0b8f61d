"""The inputs of a step on a CPU: gathered from the host's columns, without a Python loop over sequences or tokens."""

from __future__ import annotations

import numpy as np
import torch

from quire.attention.interface import AttentionBatch
from quire.worker.block_tables import BlockTables
from quire.worker.input_batch import InputBatch


def prepare_inputs(
    batch: InputBatch, token_table: np.ndarray, tables: BlockTables
) -> tuple[torch.Tensor, AttentionBatch]:
    """token_table: [num_rows, capacity] int32. Returns the token ids, [T] int64, and the attention batch. At least one
    sequence is scheduled."""
    rows, positions, sequence_index = batch.rows, batch.starts, np.arange(len(batch.rows))
    if batch.num_tokens != len(rows):  # otherwise each sequence has one token: most steps are decodes
        positions, sequence_index = batch.positions, batch.sequence_index
        rows = rows[sequence_index]
    token_ids = token_table[rows, positions].astype(np.int64)
    block_tables, block_sizes = tables.gather(batch.rows, int(batch.ends.max())), tables.block_sizes
    places = {size: np.divmod(positions, size) for size in set(block_sizes)}
    slots = (
        table[sequence_index, places[size][0]].astype(np.int64) * size + places[size][1]
        for table, size in zip(block_tables, block_sizes, strict=True)
    )
    attention = AttentionBatch(
        query_start=torch.from_numpy(batch.query_start),
        start_positions=torch.from_numpy(batch.starts),
        positions=torch.from_numpy(positions),
        sequence_index=torch.from_numpy(sequence_index),
        block_tables=tuple(torch.from_numpy(table) for table in block_tables),
        slot_mapping=tuple(torch.from_numpy(slot) for slot in slots),
    )
    return torch.from_numpy(token_ids), attention
