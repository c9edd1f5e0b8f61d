"""Drafts of a smaller model: its likeliest tokens after a sequence's last one.

Its keys and values are in further layers of the same KV cache; wrong ones only make drafts worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.attention.tiles import ragged
from quire.config.speculation import SpeculationConfig
from quire.kv_cache.layout import FOREIGN_LAYER, KVCacheLayout
from quire.worker.block_tables import BlockTables
from quire.worker.columns import STEP_COLUMNS, ColumnValues
from quire.worker.drafts import HostDrafts, Placed
from quire.worker.finders import NO_FINDER
from quire.worker.input_batch import InputBatch

if TYPE_CHECKING:
    from quire.step import StepPlan
    from quire.worker.platform.cpu_inputs import CacheBackends
    from quire.worker.platform.interface import DraftModel
    from quire.worker.request_state import RequestState

MOST_BEHIND = 16
"""Maximum tokens of a sequence without drafts computed together."""
FRESH = 2**62
"""Computed tokens of a row whose keys and values come from elsewhere."""


def layers_of(layout: KVCacheLayout, layers: range) -> KVCacheLayout:
    """Pool's layout seen by a model that owns only some of its layers (main or draft model), numbered from 0."""
    groups = tuple(
        replace(group, layers=tuple(each - layers.start if each in layers else FOREIGN_LAYER for each in group.layers))
        for group in layout.groups
    )
    return replace(layout, groups=groups)


class ModelDrafts(HostDrafts):
    """Makes drafts on a CPU with a second, smaller model."""

    writes_blocks = True

    def __init__(
        self,
        config: SpeculationConfig,
        draft_model: DraftModel,
        tables: BlockTables,
        backends: CacheBackends,
        vocab_size: int,
        *,
        has_states: bool,
    ) -> None:
        """backends: over the draft model's layers. vocab_size: main model's. has_states: see HostDrafts."""
        super().__init__(tables.num_rows, config.max_drafts, NO_FINDER, has_states=has_states)
        own, self._model = draft_model.config, draft_model.model
        self._tables = tables
        self._backends = backends
        self._columns = ColumnValues(STEP_COLUMNS, self._model.columns, tables.num_rows)
        """Columns of plain texts, without adapters and images."""
        self._own_size, self._other_size = own.vocab_size, vocab_size
        self._longest = own.max_model_len
        self._mask_token = None if config.draft_model is None else config.draft_model.mask_token
        windows = [window for window in own.sliding_windows if window is not None]
        self._most_behind = 0 if windows else MOST_BEHIND
        self._most_again = min(windows, default=FRESH) - 1
        """Most tokens before a step that have blocks in all layers."""
        self._computed = np.full(tables.num_rows, FRESH, np.int64)
        """Leading tokens of each row that the draft model has computed; right drafts add to them."""
        self._first, self._num_fed = (np.zeros(tables.num_rows, np.int64) for _ in range(2))
        """Position of each row's first draft, and number of its drafts that the model has computed."""
        self._unknown: list[int] = []

    def forget(self, row: int) -> None:
        self._computed[row], self._num_fed[row] = FRESH, 0

    def copy(self, source: int, destination: int) -> None:
        for column in (self._computed, self._first, self._num_fed, self._drafts):
            column[destination] = column[source]

    def place(self, plan: StepPlan, requests: RequestState) -> Placed:
        placed = super().place(plan, requests)
        self._unknown = [index for index in self._placed if plan.seq_ids[index] not in plan.drafts]
        return placed

    def _found(self, row: int, length: int, wanted: int) -> list[int]:
        return [0] * min(wanted, max(0, self._longest - length))

    def make(self, batch: InputBatch, table: np.ndarray) -> bool:
        num_drafts = np.zeros(len(batch.rows), np.int64) if batch.num_drafts is None else batch.num_drafts
        known = batch.ends - num_drafts
        starts = self._reached(batch.rows, batch.starts, table)
        self._computed[batch.rows] = np.minimum(self._computed[batch.rows], batch.starts)
        wanted = np.zeros(len(batch.rows), np.int64)
        unknown, self._unknown = self._unknown, []
        wanted[unknown] = num_drafts[unknown]
        known = np.minimum(known, self._longest)
        is_due = (wanted > 0) | (known - starts > self._most_behind) | (batch.counts - num_drafts > 1)
        due = np.flatnonzero(is_due & (known > starts))
        if not len(due):
            return False
        self._guess(batch.rows[due], starts[due], known[due], wanted[due], table)
        for index in unknown:
            row, first = batch.rows[index], known[index]
            self._placed[index] = table[row, first : first + num_drafts[index]].tolist()
        return bool(unknown)

    def look_up(
        self, rows: np.ndarray, ends: np.ndarray, table: np.ndarray, needed: Sequence[int] = ()
    ) -> list[int] | None:
        most = self._drafts.shape[1]
        counts = np.clip(self._longest - (ends + 1), 0, most)
        if len(needed):
            own = rows[list(needed)]
            counts[list(needed)] = np.clip(self._tables.room(own) - ends[list(needed)], 0, counts[list(needed)])
            due = np.array([index for index in needed if counts[index]], np.int64)
            if len(due):
                starts = self._reached(rows[due], ends[due], table)
                self._guess(rows[due], starts, ends[due] + 1, counts[due], table)
        return counts.tolist() if counts.any() else None

    def _reached(self, rows: np.ndarray, starts: np.ndarray, table: np.ndarray) -> np.ndarray:
        """First position of each row that the draft model has not computed, at most `starts`, [R]."""
        reached = np.maximum(np.minimum(self._computed[rows], starts), starts - self._most_again)
        first, ends = self._first[rows], np.minimum(self._first[rows] + self._num_fed[rows], starts)
        while True:
            fed = (first <= reached) & (reached < ends)
            if not fed.any():
                return reached
            at = np.flatnonzero(fed)
            fed[at] = table[rows[at], reached[at]] == self._drafts[rows[at], reached[at] - first[at]]
            if not fed.any():
                return reached
            reached, ends = reached + fed, np.where(fed, ends, reached)

    def _guess(
        self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, counts: np.ndarray, table: np.ndarray
    ) -> None:
        """Compute known tokens (positions starts to ends - 1) of distinct rows and `counts` drafts after them; all
        [R]."""
        if self._mask_token is not None:
            self._guess_at_once(rows, starts, ends, counts, table)
            return
        batch = InputBatch.of(rows, starts, ends - starts)
        guessing = np.flatnonzero(counts)
        read = batch.query_start[1:] - 1
        hidden = self._hidden(batch, table, read[guessing] if len(guessing) else read)
        self._computed[rows], self._num_fed[rows] = ends, 0
        rows, ends, counts = rows[guessing], ends[guessing], counts[guessing]
        self._first[rows], self._num_fed[rows] = ends, counts - 1
        number = 0
        while len(rows):
            tokens = self._overwrite(rows, ends + number, self._likeliest(hidden))
            table[rows, ends + number] = tokens
            self._drafts[rows, number] = tokens
            number += 1
            more = counts > number
            rows, ends, counts = rows[more], ends[more], counts[more]
            if len(rows):
                hidden = self._hidden(InputBatch.of(rows, ends + number - 1, np.ones_like(rows)), table, None)

    def _guess_at_once(
        self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, counts: np.ndarray, table: np.ndarray
    ) -> None:
        """Do the same as `_guess` in one pass over known and mask tokens. The keys of mask tokens count as not
        computed."""
        self._computed[rows], self._first[rows], self._num_fed[rows] = ends, ends, 0
        sources, numbers = ragged(counts)
        places = rows[sources], ends[sources] + numbers
        table[places] = self._mask_token
        lengths = ends - starts + np.maximum(counts - 1, 0)
        batch = InputBatch.of(rows, starts, lengths)
        read = batch.query_start[1:][sources] - counts[sources] + numbers
        hidden = self._hidden(batch, table, read if len(read) else batch.query_start[1:] - 1)
        if len(read):
            tokens = self._overwrite(*places, self._likeliest(hidden))
            table[places] = self._drafts[rows[sources], numbers] = tokens

    def _hidden(self, batch: InputBatch, table: np.ndarray, read: np.ndarray | None) -> torch.Tensor:
        from quire.worker.platform.cpu_inputs import prepare_inputs

        token_ids, attention = prepare_inputs(batch, table, self._tables)
        if self._own_size < self._other_size:
            token_ids[token_ids >= self._own_size] = 0
        rows = None if read is None else torch.from_numpy(read)
        columns = self._columns.of_tokens(batch)
        return self._model.forward(self._backends.forward_batch(token_ids, attention, rows, columns)).hidden

    def _likeliest(self, hidden: torch.Tensor) -> np.ndarray:
        logits = self._model.compute_logits(hidden)[:, : self._other_size]
        tokens: np.ndarray = logits.argmax(1).numpy()
        return tokens
