"""Inputs of steps whose prompts several ranks share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.attention.interface import AttentionBatch
from quire.attention.native_backend import NativeAttention, NativeAttentionStep
from quire.attention.shared_prompts import KeyExchange, RowExchange, SharedPromptsStep
from quire.kernels.cpu.runtime import NativeRuntime
from quire.layers.batch import ForwardBatch, ForwardResult
from quire.parallel.interface import ProcessGroup
from quire.worker.block_tables import BlockTables
from quire.worker.input_batch import InputBatch
from quire.worker.platform.cpu_inputs import CacheBackends, CpuColumns, StepInputs, prepare_inputs

LEAST_TOKENS = 16
"""Prompt tokens per rank from which a step is dealt. Below, exchanges cost more than the spared rows."""


class SharedInputs:
    """StepInputs of this rank's part of each step with prompts; of whole other steps. For ranks that share prompts."""

    def __init__(
        self,
        whole: StepInputs,
        columns: CpuColumns,
        tables: BlockTables,
        backends: CacheBackends,
        group: ProcessGroup,
        runtime: NativeRuntime,
    ) -> None:
        """whole: inputs of whole steps, gathered from `columns`. group: ranks that share prompts."""
        assert isinstance(backends.attention, NativeAttention), "native kernels attend"
        self._whole = whole
        self._columns, self._tables, self._backends = columns, tables, backends
        self._rows = RowExchange(group, runtime)
        self._keys = KeyExchange(backends.attention, self._rows, runtime)
        self._group = group
        self._tokens: list[np.ndarray] = []
        """Each rank's tokens of the last step; none: each rank has all."""
        self._read: list[np.ndarray] = []
        """Their places among the read ones."""

    def forward_batch(self, batch: InputBatch, logits_rows: torch.Tensor | None) -> ForwardBatch:
        owner = None if batch.is_decode else owners(batch.counts, self._group.size)
        if owner is None:
            self._tokens = []
            return self._whole.forward_batch(batch, logits_rows)
        group = self._group
        self._tokens = tokens = [np.flatnonzero(owner == rank) for rank in range(group.size)]
        own = tokens[group.rank]
        others = batch_of_tokens(batch, np.concatenate(tokens[: group.rank] + tokens[group.rank + 1 :]))
        self._keys.start_step(np.bincount(owner, minlength=group.size).tolist(), self._prepare(others)[1])
        share = batch_of_tokens(batch, own)
        token_ids, attention = self._prepare(share)
        columns, read = self._columns.values.of_tokens(share), self._deal_read(batch, own, owner)
        inputs = self._backends.forward_batch(token_ids, attention, read, columns)
        assert isinstance(inputs.attention, NativeAttentionStep), "native kernels attend"
        return inputs._replace(attention=SharedPromptsStep(self._keys, inputs.attention))

    def gather(self, result: ForwardResult[torch.Tensor]) -> ForwardResult[torch.Tensor]:
        """Results of the whole last step. result: of this rank's part."""
        if not self._tokens:
            return result
        tapped = {layer: self._gather(rows, self._tokens) for layer, rows in result.tapped.items()}
        return ForwardResult(self._gather(result.hidden, self._read), tapped)

    def _gather(self, rows: torch.Tensor, places: Sequence[np.ndarray]) -> torch.Tensor:
        rank, counts = self._group.rank, [len(each) for each in places]
        own = rows[: counts[rank]]
        found = own.new_empty(sum(counts), own.shape[1])
        found[torch.from_numpy(places[rank])] = own
        others = np.concatenate([each for other, each in enumerate(places) if other != rank])
        found[torch.from_numpy(others)] = self._rows.others(own, counts)
        return found

    def _prepare(self, batch: InputBatch) -> tuple[torch.Tensor, AttentionBatch]:
        return prepare_inputs(batch, self._columns.token_ids, self._tables)

    def _deal_read(self, batch: InputBatch, own: np.ndarray, owner: np.ndarray) -> torch.Tensor | None:
        """Read rows of this rank's part, at least one: kernels take no rows for all. None: all tokens are read."""
        read = np.arange(batch.num_tokens) if batch.logits_rows is None else batch.logits_rows
        readers = owner[read]
        self._read = [np.flatnonzero(readers == rank) for rank in range(self._group.size)]
        if batch.logits_rows is None:
            return None
        rows = np.searchsorted(own, read[self._read[self._group.rank]])
        return torch.from_numpy(rows if len(rows) else np.zeros(1, np.int64))


def owners(counts: np.ndarray, num_ranks: int) -> np.ndarray | None:
    """Rank that computes each token of a step, [T] int64; None: every rank computes all. counts: [S] tokens of each
    sequence.

    A chunk is cut into two pieces per rank; each rank takes an early one and its late mirror, so ranks attend to about
    as many keys. Shorter sequences go to the rank with the fewest tokens.
    """
    num_pieces = 2 * num_ranks
    is_long = counts >= num_pieces
    if counts[is_long].sum() < LEAST_TOKENS * num_ranks:
        return None
    takers = np.concatenate((np.arange(num_ranks), np.arange(num_ranks)[::-1]))
    dealt: list[np.ndarray] = [np.zeros(0, np.int64)] * len(counts)
    loads = np.zeros(num_ranks, np.int64)
    for index in np.flatnonzero(is_long).tolist():
        borders = counts[index] * np.arange(num_pieces + 1) // num_pieces
        dealt[index] = np.repeat(takers, np.diff(borders))
        loads += np.bincount(dealt[index], minlength=num_ranks)
    for index in np.flatnonzero(~is_long).tolist():
        taker = int(loads.argmin())
        dealt[index] = np.full(counts[index], taker, np.int64)
        loads[taker] += counts[index]
    return np.concatenate(dealt)


def batch_of_tokens(batch: InputBatch, tokens: np.ndarray) -> InputBatch:
    """Batch of some of a batch's tokens, at least one, int64: each run of successive tokens counts as a sequence."""
    sequences, positions = batch.sequence_index[tokens], batch.positions[tokens]
    is_first = np.ones(len(tokens), np.bool_)
    is_first[1:] = (np.diff(tokens) != 1) | (np.diff(sequences) != 0)
    firsts = np.flatnonzero(is_first)
    counts = np.diff(np.append(firsts, len(tokens)))
    return InputBatch.of(batch.rows[sequences[firsts]], positions[firsts], counts)
