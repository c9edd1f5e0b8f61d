"""Drafts of a smaller model on a device (quire/worker/model_drafts.py has the host version). A pass at a step's start
computes the last tokens that the draft model may lack: two after drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.attention.tiles import ragged
from quire.config.speculation import SpeculationConfig
from quire.kernels.triton.model_drafts import begin_pass, write_behind, write_guesses
from quire.kernels.triton.rows import StepColumns
from quire.models.interface import CausalLM
from quire.sampling.results import Deferred, ready
from quire.step import StepPlan
from quire.worker.cuda_graphs import CudaGraphRunner, DeviceBackends
from quire.worker.graph_dispatch import choose_execution
from quire.worker.input_batch import InputBatch
from quire.worker.model_drafts import MOST_BEHIND
from quire.worker.platform.device_drafts import DeviceDrafts, DraftSections, PassSections
from quire.worker.platform.device_inputs import DeviceInputs
from quire.worker.platform.state_arena import StateArena
from quire.worker.platform.upload import Section, Upload
from quire.worker.sample_rows import SampleRows
from quire.worker.warm_up import warm_up_attention

MOST_ROWS = 2
"""Tokens of a sequence in most passes: the last one, and maybe a draft accepted."""


class DraftPasses(NamedTuple):
    """Passes of a draft model over the rows of a device. own_size, other_size: vocabularies of the draft model and of
    the main one. longest: maximum tokens of a sequence. window: shortest window of its layers (None: all see all)."""

    runner: CudaGraphRunner
    inputs: DeviceInputs
    backends: DeviceBackends
    own_size: int
    other_size: int
    longest: int
    window: int | None

    @property
    def model(self) -> CausalLM:
        return self.runner.model

    def run(
        self, batch: InputBatch, columns: StepColumns, rows: torch.Tensor | None, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Enqueue a pass; returns hidden states of the tokens `rows` (None: at least all). batch: with the host's
        bounds of lengths. columns: with the device's own. hidden: [T, size], what a head reads of each token."""
        num_seqs = len(batch.rows)
        execution = choose_execution(
            batch.num_tokens, num_seqs, batch.max_query_len, self.runner.settings, is_decode=True
        )
        inputs, tokens = self.inputs.prepare(batch, columns, execution.num_seqs, execution.num_tokens)
        if self.own_size < self.other_size:
            tokens.token_ids.masked_fill_(tokens.token_ids >= self.own_size, 0)
        return self.runner.run(execution, inputs, tokens._replace(hidden=hidden), rows).hidden

    def likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        """Likeliest tokens after hidden states: [G, size] -> [G] int64."""
        return self.model.compute_logits(hidden)[:, : self.other_size].argmax(1)

    def prepare(self, max_num_seqs: int, max_num_tokens: int) -> None:
        """Compile the kernels of all kinds of passes, and capture graphs."""
        if max_num_seqs > 1:
            warm_up_attention(self.model, self.backends, self.inputs, self.longest, max_num_tokens)
        batch, columns = self.inputs.padding(1, 1)
        self.likeliest(self.model.forward(self.backends.forward_batch(columns, batch)).hidden)
        self.runner.capture_at_start(lambda each: self.inputs.padding(each.num_seqs, each.num_tokens))


class MadeDrafts(DeviceDrafts):
    """Base of drafters that run a head's or model's passes on a device. Constrained sequences have none."""

    writes_blocks = True

    def __init__(
        self,
        arena: StateArena,
        config: SpeculationConfig,
        queue_depth: int,
        passes: DraftPasses,
        num_rows: int,
        *,
        has_states: bool,
    ) -> None:
        super().__init__(arena, config, queue_depth, has_states=has_states)
        self._passes = passes
        self._counting = torch.arange(num_rows + 1, dtype=torch.int32, device=arena.words.device)

    def _most_behind_tokens(self, num_tokens: int) -> int:
        return max(0, min(self._arena.drafts.max_drafts, self._passes.longest - num_tokens))

    def _num_ready(self, plan: StepPlan, samples: SampleRows | None) -> list[int]:
        if samples is None:
            return []
        firsts = samples.starts
        ends = samples.lengths[firsts[:-1]] + np.diff(firsts)  # with all drafts and the sampled token
        masked = plan.masked_seq_ids
        return [
            0 if seq_id in masked else self._most_behind_tokens(end)
            for seq_id, end in zip(samples.seq_ids, ends.tolist(), strict=True)
        ]

    def _stage_guesses(self, own: InputBatch, sources: np.ndarray, wanted: np.ndarray, upload: Upload) -> PassSections:
        """Add a draft model's pass over `own` to the upload. sources: [P], its sequences' indices in the step. wanted:
        [P], drafts to guess, descending."""
        num_guessing = [int((wanted > number).sum()) for number in range(int(wanted[0]))]
        read = own.query_start[1 : 1 + max(1, *num_guessing[:1], 1)] - 1
        columns = [upload.add(column) for column in (own.rows, sources, own.query_start, read)]
        return PassSections(own, columns, num_guessing)

    def _find(
        self, samples: tuple[torch.Tensor, torch.Tensor, torch.Tensor], sections: DraftSections
    ) -> Sequence[Deferred[Any]]:
        return [ready(list(sections.num_ready))]


class DeviceModelDrafts(MadeDrafts):
    def __init__(
        self,
        arena: StateArena,
        config: SpeculationConfig,
        queue_depth: int,
        passes: DraftPasses,
        num_rows: int,
        *,
        has_states: bool,
    ) -> None:
        super().__init__(arena, config, queue_depth, passes, num_rows, has_states=has_states)
        self._most_behind = MOST_BEHIND if passes.window is None else 0
        self._mask_token = None if config.draft_model is None else config.draft_model.mask_token
        """Token of parallel drafts for unknown ones; None: drafts are made one behind the other."""
        most_masks = 0 if self._mask_token is None else num_rows * config.max_drafts
        self._masks = torch.full((most_masks,), self._mask_token or 0, device=arena.words.device)
        self._behind = np.zeros(num_rows, np.int64)
        """Maximum tokens before a row's next step that the draft model lacks."""
        self._copied: list[tuple[int, int]] = []
        """Rows copied for the coming step: source and destination."""

    def forget(self, row: int) -> None:
        self._behind[row] = 0

    def copy(self, source: int, destination: int) -> None:
        self._behind[destination] = self._behind[source]
        self._copied.append((source, destination))

    def stage(self, plan: StepPlan, batch: InputBatch, samples: SampleRows | None, upload: Upload) -> DraftSections:
        assert not self._given, "the scheduler knows no drafts"
        pending = np.array([self._pending(seq_id) for seq_id in plan.seq_ids], np.int64)
        sections = super().stage(plan, batch, samples, upload)
        made = self._stage_pass(batch, pending, upload)
        return DraftSections(sections.placed, sections.accepted, made=made, num_ready=self._num_ready(plan, samples))

    def _stage_pass(self, batch: InputBatch, pending: np.ndarray, upload: Upload) -> PassSections | None:
        wanted = np.zeros(len(batch.rows), np.int64) if batch.num_drafts is None else batch.num_drafts
        num_known = batch.counts - wanted
        ends = batch.ends - wanted
        missing = self._behind[batch.rows] + num_known
        is_due = (wanted > 0) | (missing > self._most_behind) | (num_known > 1)
        is_due &= ends <= self._passes.longest
        # A step adds its accepted drafts and one token; of these the draft model has all but the last two, or none.
        again = (wanted > 0).astype(np.int64) if self._mask_token is None else self._again(wanted)
        self._behind[batch.rows] = np.where(is_due, again, missing)
        computed = set(batch.rows.tolist())
        for source, destination in self._copied:
            if source in computed and destination not in computed:  # sampled from the source's last token
                self._behind[destination] = self._behind[source]
        self._copied.clear()
        due = np.flatnonzero(is_due)
        if not len(due):
            return None
        due = due[np.argsort(-wanted[due], kind="stable")]
        counts, ends, wanted = np.minimum(missing, ends - pending)[due], ends[due], wanted[due]
        if self._mask_token is None:
            own = InputBatch.of(batch.rows[due], ends - counts, counts)
            return self._stage_guesses(own, due, wanted, upload)
        own = InputBatch.of(batch.rows[due], ends - counts, counts + np.maximum(wanted - 1, 0))
        guessing, numbers = ragged(wanted)
        read = own.query_start[1:][guessing] - wanted[guessing] + numbers if len(guessing) else own.query_start[1:2] - 1
        columns = [upload.add(column) for column in (own.rows, due, own.query_start, read, guessing, numbers)]
        return PassSections(own, columns, [len(guessing)])

    def _again(self, num_drafts: np.ndarray) -> np.ndarray:
        """Most accepted drafts of a step whose keys the next pass computes, as far as all layers have blocks."""
        window = self._passes.window
        return num_drafts if window is None else np.minimum(num_drafts, window - 1)

    def make(self, columns: StepColumns, sections: DraftSections, upload: Upload) -> None:
        made = sections.made
        if made is None:
            return
        if self._mask_token is not None:
            self._make_at_once(columns, sections.placed[0], made, upload)
            return
        arena, passes = self._arena, self._passes
        rows, sources, query_start, read = map(upload.view, made.columns)
        starts, ends = begin_pass(columns, upload.view(sections.placed[0]), sources, query_start)
        hidden = passes.run(made.batch, StepColumns(rows, starts, query_start), read)
        for number, count in enumerate(made.num_guessing):
            guesses = passes.likeliest(hidden[:count])
            write_guesses(arena.words, arena.drafts, rows, ends, guesses, starts, number)
            more = sum(made.num_guessing[number + 1 : number + 2])
            if more:
                batch = made.batch
                batch = InputBatch.of(batch.rows[:more], batch.ends[:more] + number, np.ones(more, np.int64))
                next_columns = StepColumns(rows[:more], starts[:more], self._counting[: more + 1])
                hidden = passes.run(batch, next_columns, None)

    def _make_at_once(self, columns: StepColumns, num_drafts: Section, made: PassSections, upload: Upload) -> None:
        arena, passes = self._arena, self._passes
        rows, sources, query_start, read, *where = map(upload.view, made.columns)
        starts, ends = begin_pass(columns, upload.view(num_drafts), sources, query_start, has_masks=True)
        sequences, [num_guesses] = (rows, ends), made.num_guessing
        if num_guesses:
            places = where[0], where[1]
            write_behind(arena.words, arena.drafts, sequences, places, self._masks[:num_guesses], has_texts=False)
        hidden = passes.run(made.batch, StepColumns(rows, starts, query_start), read)
        if num_guesses:
            guesses = passes.likeliest(hidden[:num_guesses])
            write_behind(arena.words, arena.drafts, sequences, places, guesses, has_texts=True)

    def prepare(self, max_num_tokens: int) -> None:
        arena, pair = self._arena, self._counting[:2]
        one = pair[:1]
        starts, ends = begin_pass(StepColumns(one, one, pair), one, one, pair)
        token = torch.zeros_like(one).long()
        if self._mask_token is None:
            write_guesses(arena.words, arena.drafts, one, ends, token, starts, 0)
        else:
            begin_pass(StepColumns(one, one, pair), one, one, pair, has_masks=True)
            for has_texts in (False, True):
                write_behind(arena.words, arena.drafts, (one, ends), (one, one), token, has_texts=has_texts)
        self._passes.prepare(len(self._behind), max_num_tokens)
