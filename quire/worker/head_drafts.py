"""Drafts of a head (quire/models/draft_head.py). The head computes each step's tokens with a known successor; drafts
start from the last result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.config.speculation import SpeculationConfig
from quire.worker.block_tables import BlockTables
from quire.worker.columns import STEP_COLUMNS, ColumnValues
from quire.worker.drafts import HostDrafts, Placed
from quire.worker.finders import NO_FINDER
from quire.worker.input_batch import InputBatch

if TYPE_CHECKING:
    from quire.layers.batch import ForwardResult
    from quire.models.interface import CausalLM
    from quire.step import StepPlan
    from quire.worker.platform.cpu_inputs import CacheBackends
    from quire.worker.platform.interface import HeadInputs
    from quire.worker.request_state import RequestState


class HeadDrafts(HostDrafts):
    """Makes drafts with a model's head on a CPU."""

    writes_blocks = True
    follows = True

    def __init__(
        self,
        config: SpeculationConfig,
        head: CausalLM,
        reads: HeadInputs,
        tables: BlockTables,
        backends: CacheBackends,
        longest: int,
        *,
        has_states: bool,
    ) -> None:
        """reads: hidden states for the head. backends: over the head's layers. longest: maximum tokens of a
        sequence."""
        super().__init__(tables.num_rows, config.max_drafts, NO_FINDER, has_states=has_states)
        self._head = head
        self.taps, self.reads_all = reads.taps, not reads.taps
        self._token_ids = reads.token_ids
        self._hidden = torch.zeros(0)
        self._tables = tables
        self._backends = backends
        self._longest = longest
        self._columns = ColumnValues(STEP_COLUMNS, head.columns, tables.num_rows)
        self._results = torch.zeros(tables.num_rows, head.output_size)
        """Head's result for the last token but one of each row."""
        self._known = np.zeros(tables.num_rows, np.int64)
        """Tokens of each row at that result."""
        self._unknown: list[int] = []

    def forget(self, row: int) -> None:
        self._known[row] = 0

    def copy(self, source: int, destination: int) -> None:
        self._known[destination] = 0

    def place(self, plan: StepPlan, requests: RequestState) -> Placed:
        placed = super().place(plan, requests)
        self._unknown = [index for index in self._placed if plan.seq_ids[index] not in plan.drafts]
        return placed

    def _found(self, row: int, length: int, wanted: int) -> list[int]:
        return [0] * wanted if self._known[row] == length else []

    def make(self, batch: InputBatch, table: np.ndarray) -> bool:
        unknown, self._unknown = self._unknown, []
        if not unknown:
            return False
        assert batch.num_drafts is not None, "the step has drafts"
        counts = batch.num_drafts[unknown]
        rows, lengths = batch.rows[unknown], batch.ends[unknown] - counts
        self._guess(rows, lengths, counts, table)
        for index, row, count in zip(unknown, rows.tolist(), counts.tolist(), strict=True):
            self._placed[index] = self._drafts[row, :count].tolist()
        return True

    def keep_results(self, result: ForwardResult[torch.Tensor]) -> None:
        self._hidden = torch.cat([result.tapped[layer] for layer in self.taps], 1) if self.taps else result.hidden

    def follow(self, batch: InputBatch, lengths: np.ndarray, table: np.ndarray) -> None:
        hidden = self._hidden
        counts = np.minimum(batch.ends, lengths - 1) - batch.starts
        due = np.flatnonzero(counts > 0)
        own = InputBatch.of(batch.rows[due], batch.starts[due], counts[due])
        if own.num_tokens != len(hidden):
            shift = np.repeat(batch.query_start[:-1][due] - own.query_start[:-1], own.counts)
            hidden = hidden[torch.from_numpy(np.arange(own.num_tokens) + shift)]
        results = self._run(own, hidden, own.query_start[1:] - 1, table)
        self._results = self._results.to(results.dtype)  # that of the first, from then on
        self._results[own.rows] = results
        self._known[own.rows] = own.ends + 1

    def look_up(
        self, rows: np.ndarray, ends: np.ndarray, table: np.ndarray, needed: Sequence[int] = ()
    ) -> list[int] | None:
        lengths = ends + 1
        counts = np.where(self._known[rows] == lengths, np.clip(self._longest - lengths, 0, self._drafts.shape[1]), 0)
        if len(needed):
            own = np.array(needed, np.int64)
            # The first draft needs no slot; each further draft needs one.
            counts[own] = np.clip(1 + self._tables.room(rows[own]) - ends[own], 0, counts[own])
            due = own[counts[own] > 0]
            self._guess(rows[due], lengths[due], counts[due], table)
        return counts.tolist() if counts.any() else None

    def _guess(self, rows: np.ndarray, lengths: np.ndarray, counts: np.ndarray, table: np.ndarray) -> None:
        """Make `counts` drafts after the `lengths` known tokens of distinct rows (all [R]), and write them to the token
        table."""
        results, number = self._results[rows], 0
        while len(rows):
            tokens = self._head.compute_logits(results).argmax(1).numpy()
            if self._token_ids is not None:
                tokens = self._token_ids[tokens]
            tokens = self._overwrite(rows, lengths + number, tokens)
            table[rows, lengths + number] = tokens
            self._drafts[rows, number] = tokens
            number += 1
            more = counts > number
            rows, lengths, counts, results = rows[more], lengths[more], counts[more], results[torch.from_numpy(more)]
            if len(rows):
                batch = InputBatch.of(rows, lengths + number - 2, np.ones_like(rows))
                results = self._run(batch, results, None, table)

    def _run(self, batch: InputBatch, hidden: torch.Tensor, read: np.ndarray | None, table: np.ndarray) -> torch.Tensor:
        from quire.worker.platform.cpu_inputs import prepare_inputs

        followers, attention = prepare_inputs(batch, table[:, 1:], self._tables)
        rows = None if read is None else torch.from_numpy(read)
        inputs = self._backends.forward_batch(followers, attention, rows, self._columns.of_tokens(batch))
        return self._head.forward(inputs.having(hidden=hidden)).hidden
