"""Drafts of a head on a device (quire/worker/head_drafts.py has the host version). After acceptance the head computes
all of a step's tokens, rejected drafts too, whose keys later steps write over. The device keeps the result for each
sequence's last accepted token."""

from __future__ import annotations

import numpy as np
import torch

from quire.config.speculation import SpeculationConfig
from quire.kernels.triton.model_drafts import begin_pass, last_tokens, write_guesses
from quire.kernels.triton.rows import StepColumns
from quire.layers.batch import ForwardResult
from quire.step import StepPlan
from quire.worker.drafts import Placed
from quire.worker.input_batch import InputBatch
from quire.worker.platform.device_drafts import DraftSections, PassSections
from quire.worker.platform.device_model_drafts import DraftPasses, MadeDrafts
from quire.worker.platform.interface import HeadInputs
from quire.worker.platform.state_arena import StateArena
from quire.worker.platform.upload import Upload
from quire.worker.request_state import RequestState
from quire.worker.sample_rows import SampleRows


class DeviceHeadDrafts(MadeDrafts):
    """Makes drafts with a model's head on a device. Rows that no step has computed have no drafts, nor have children in
    their first step."""

    def __init__(
        self,
        arena: StateArena,
        config: SpeculationConfig,
        queue_depth: int,
        passes: DraftPasses,
        num_rows: int,
        reads: HeadInputs,
        *,
        has_states: bool,
    ) -> None:
        """passes: the head's, whose inputs are each position's next token. reads: hidden states for the head."""
        super().__init__(arena, config, queue_depth, passes, num_rows, has_states=has_states)
        self.taps, self.reads_all = reads.taps, not reads.taps
        device = arena.words.device
        self._guessable = None if reads.token_ids is None else torch.from_numpy(reads.token_ids).to(device)
        self._hidden = self._results = torch.zeros(0, 0, device=device)
        """Hidden states of the step's tokens; the head's result for the last token but one of each row."""
        self._is_known = np.zeros(num_rows, bool)
        """True for rows whose result follows from their last step."""

    def forget(self, row: int) -> None:
        self._is_known[row] = False

    def copy(self, source: int, destination: int) -> None:
        self._is_known[destination] = False

    def place(self, plan: StepPlan, requests: RequestState) -> Placed:
        placed = super().place(plan, requests)
        rows = requests.rows_of(plan.seq_ids)
        counts = np.array(placed.counts, np.int64)
        # Behind several known tokens, such as forced ones, the result is that of an earlier token.
        lacks = (placed.num_drafts > 0) & (~self._is_known[rows] | (counts - placed.num_drafts != 1))
        if not lacks.any():
            return placed
        dropped = np.where(lacks, placed.num_drafts, 0)
        return Placed(placed.starts, (counts - dropped).tolist(), placed.num_drafts - dropped)

    def stage(self, plan: StepPlan, batch: InputBatch, samples: SampleRows | None, upload: Upload) -> DraftSections:
        assert not self._given, "the scheduler knows no drafts"
        sections = super().stage(plan, batch, samples, upload)
        num_ready = self._num_ready(plan, samples)
        is_sampled = np.zeros(len(batch.rows), bool)
        if samples is not None:
            rows = samples.rows[samples.starts[:-1]]
            is_sampled = np.isin(batch.rows, rows)
            num_ready = np.where(np.isin(rows, batch.rows), num_ready, 0).tolist()
        self._is_known[batch.rows] = is_sampled
        step = InputBatch.of(batch.rows, batch.starts, batch.counts)
        followed = step, upload.add(is_sampled)
        made = None if batch.num_drafts is None else self._stage_drafts(batch, batch.num_drafts, upload)
        return DraftSections(sections.placed, sections.accepted, made=made, followed=followed, num_ready=num_ready)

    def _stage_drafts(self, batch: InputBatch, wanted: np.ndarray, upload: Upload) -> PassSections | None:
        due = np.argsort(-wanted, kind="stable")[: int((wanted > 0).sum())]
        if not len(due):
            return None
        own = InputBatch.of(batch.rows[due], (batch.ends - wanted)[due] - 1, np.ones(len(due), np.int64))
        return self._stage_guesses(own, due, wanted[due], upload)

    def make(self, columns: StepColumns, sections: DraftSections, upload: Upload) -> None:
        made = sections.made
        if made is None:
            return
        arena, passes = self._arena, self._passes
        rows, sources, query_start, _ = map(upload.view, made.columns)
        starts, ends = begin_pass(columns, upload.view(sections.placed[0]), sources, query_start)
        results = self._results.index_select(0, rows)
        for number, count in enumerate(made.num_guessing):
            guesses = passes.likeliest(results[:count])
            if self._guessable is not None:
                guesses = self._guessable.index_select(0, guesses)
            write_guesses(arena.words, arena.drafts, rows, ends, guesses, starts, number)
            more = sum(made.num_guessing[number + 1 : number + 2])
            if more:
                batch = InputBatch.of(
                    made.batch.rows[:more], made.batch.starts[:more] + number, np.ones(more, np.int64)
                )
                # The draft is the next token of the position before its own.
                next_columns = StepColumns(rows[:more], starts[:more] - 1, self._counting[: more + 1])
                results = passes.run(batch, next_columns, None, results[:more])

    def prepare(self, max_num_tokens: int) -> None:
        """Does nothing: a head's kernels are compiled by the first steps with drafts."""

    def keep_results(self, result: ForwardResult[torch.Tensor]) -> None:
        self._hidden = torch.cat([result.tapped[layer] for layer in self.taps], 1) if self.taps else result.hidden

    def follow(self, columns: StepColumns, sections: DraftSections, upload: Upload) -> None:
        assert sections.followed is not None, "every step is followed"
        arena, (batch, is_sampled) = self._arena, sections.followed
        last = last_tokens(arena.words, arena.drafts, columns, upload.view(is_sampled))
        step = StepColumns(columns.rows, columns.starts, columns.query_start)
        results = self._passes.run(batch, step, last, self._hidden[: batch.num_tokens])
        if not len(self._results):
            self._results = results.new_zeros(len(self._is_known), results.shape[1])
        self._results.index_copy_(0, columns.rows.long(), results)
