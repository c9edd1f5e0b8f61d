"""Drafts from texts on the host for a device's rows (quire/worker/finders.py has the methods).

The host looks up before it knows the tokens of steps in flight, so it proposes a *path* behind its known tokens; the
device takes drafts from the path's part behind its own tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from quire.config.speculation import SpeculationConfig
from quire.sampling.results import Deferred, ready
from quire.step import StepPlan
from quire.worker.drafts import Accepted, Placed, num_to_skip
from quire.worker.finders import Finder
from quire.worker.input_batch import InputBatch
from quire.worker.platform.device_drafts import DeviceDrafts, DraftSections, Proposal
from quire.worker.platform.state_arena import StateArena
from quire.worker.platform.upload import Upload
from quire.worker.request_state import RequestState
from quire.worker.sample_rows import SampleRows


@dataclass(slots=True)
class SampledTexts:
    """Samples of a step in followed rows: index of each, its row and the row's owner. firsts: first row of each of the
    step's samples. num_drafts: number told for each sample's next step. tokens: each sample's tokens (None: the step's
    result was not read)."""

    indices: Sequence[int]
    rows: np.ndarray
    owners: np.ndarray
    firsts: Sequence[int]
    num_drafts: Sequence[int]
    tokens: Sequence[Sequence[int]] | None = None


class HostTexts:
    """Tokens of a device's rows as far as the host knows them. known: [num_rows], number of first tokens known. owners:
    [num_rows], changed with a row's sequence. are_followed: [num_rows], rows looked up."""

    def __init__(self, num_rows: int, width: int, finder: Finder, num_unknown: int, *, follows_all: bool) -> None:
        """finder: looks drafts up. width: most tokens of a row. num_unknown: steps whose tokens are unknown when one is
        launched. follows_all: False for rows with a prediction alone."""
        self.finder = finder
        self.num_unknown = num_unknown
        self.unread: deque[SampledTexts | None] = deque()
        """Steps whose tokens are not in the texts yet."""
        self.table = np.zeros((num_rows, width), np.int32)
        self.known = np.zeros(num_rows, np.int64)
        self.owners = np.zeros(num_rows, np.int64)
        self.are_followed = np.zeros(num_rows, bool)
        self._follows_all = follows_all

    def forget(self, row: int) -> None:
        self.known[row] = 0
        self.owners[row] += 1
        self.are_followed[row] = False

    def write_tokens(self, row: int, position: int, token_ids: Sequence[int]) -> None:
        if position > self.known[row] or (position == self.known[row] and self._is_sampled(row)):
            self.are_followed[row] = False  # tokens before these are on the device alone
            return
        self._write(row, position, token_ids)
        if self.are_followed[row]:
            self.finder.rewrite(row, position)

    def _is_sampled(self, row: int) -> bool:
        """True if the row has a sample that is not in its text yet."""
        owner = self.owners[row]
        return any(step is not None and bool(np.any(step.owners[step.rows == row] == owner)) for step in self.unread)

    def _write(self, row: int, position: int, token_ids: Sequence[int]) -> None:
        end = position + len(token_ids)
        if end > self.table.shape[1]:
            self.are_followed[row] = False
            return
        self.table[row, position:end] = token_ids
        self.known[row] = end

    def copy_tokens(self, source: int, destination: int, num_tokens: int) -> None:
        count = min(num_tokens, int(self.known[source]))
        self.table[destination, :count] = self.table[source, :count]
        self.known[destination] = count

    def begin_text(self, row: int, num_tokens: int, scope: str, prediction: Sequence[int]) -> None:
        if self._follows_all or prediction:
            self.finder.begin_text(row, num_tokens, scope, prediction)
            self.are_followed[row] = True

    def copy_text(self, source: int, destination: int, num_tokens: int) -> None:
        if self.are_followed[source] and self.known[destination] == num_tokens:
            self.finder.copy_text(source, destination, num_tokens)
            self.are_followed[destination] = True

    def end_text(self, row: int, num_tokens: int) -> None:
        self.learn()  # a sequence ends by a result that was read
        if self.are_followed[row]:
            self.finder.end_text(row, self.table[row, : min(num_tokens, int(self.known[row]))])
            self.are_followed[row] = False

    def learn(self) -> None:
        """Append tokens of all steps but the last `num_unknown` launched ones, so ranks know the same."""
        while len(self.unread) > self.num_unknown:
            step = self.unread.popleft()
            if step is not None:
                self._take(step)

    def _take(self, step: SampledTexts) -> None:
        for place, (row, owner) in enumerate(zip(step.rows.tolist(), step.owners.tolist(), strict=True)):
            if self.owners[row] != owner or not self.are_followed[row]:
                continue
            if step.tokens is None:
                self.are_followed[row] = False
            else:
                self._write(row, int(self.known[row]), step.tokens[place])


class DeviceTextDrafts(DeviceDrafts):
    """Makes drafts from texts on the host; constrained sequences have none of these."""

    def __init__(
        self,
        arena: StateArena,
        config: SpeculationConfig,
        queue_depth: int,
        texts: HostTexts,
        *,
        has_states: bool,
    ) -> None:
        super().__init__(arena, config, queue_depth, has_states=has_states)
        num_rows, max_drafts = len(texts.known), arena.drafts.max_drafts
        self.texts = self._texts = texts
        self._looks_up_on_device = config.method == "ngram"
        self._paths = np.zeros((num_rows, path_length(max_drafts, queue_depth)), np.int32)
        self._lengths = np.zeros(num_rows, np.int64)
        self._num_ahead = np.zeros(num_rows, np.int64)
        """Tokens of each row's path, and least tokens that the device has beyond the host's; valid for the step's
        rows."""
        self._is_looked_up = False
        """True if the coming step's paths are there."""
        self._num_fruitless = self._num_skipped = 0
        """See HostDrafts."""

    def forget(self, row: int) -> None:
        self._texts.forget(row)

    def place(self, plan: StepPlan, requests: RequestState) -> Placed:
        rows = np.array([requests.row_of(seq_id) for seq_id in plan.sample_seq_ids], np.int64)
        self._look_up(plan, plan.sample_seq_ids, rows)
        return super().place(plan, requests)

    def _look_up(self, plan: StepPlan, seq_ids: Sequence[int], rows: np.ndarray) -> None:
        """Find likely next tokens (paths) for the samples of the coming step: sequences `seq_ids`, in `rows`, [N]."""
        masked = plan.masked_seq_ids
        texts, self._is_looked_up = self._texts, True
        texts.learn()
        if masked:
            texts.are_followed[rows[[seq_id in masked for seq_id in seq_ids]]] = False
        self._lengths[rows] = self._num_ahead[rows] = 0
        for step in texts.unread:
            if step is not None:
                self._num_ahead[step.rows] += texts.owners[step.rows] == step.owners
        rows = rows[texts.are_followed[rows]]
        if not len(rows):
            return
        if self._num_skipped:
            self._num_skipped -= 1
        elif texts.finder.find_drafts(texts.table, rows, texts.known[rows], self._paths, self._lengths):
            self._num_fruitless = 0
        else:
            self._num_fruitless += 1
            self._num_skipped = num_to_skip(self._num_fruitless)

    def _proposal(self, plan: StepPlan, seq_id: int, row: int) -> Proposal | None:
        given, length = super()._proposal(plan, seq_id, row), int(self._lengths[row])
        if given is not None:
            return given
        if not length or not self._texts.are_followed[row]:
            return None if self._looks_up_on_device else Proposal([], 0)
        path = self._paths[row].tolist()
        path[length:] = [0] * (len(path) - length)
        return Proposal(path, max(0, length - int(self._num_ahead[row])), int(self._texts.known[row]))

    def stage(self, plan: StepPlan, batch: InputBatch, samples: SampleRows | None, upload: Upload) -> DraftSections:
        if samples is None:
            rows, firsts = np.zeros(0, np.int64), np.zeros(1, np.int64)
        else:
            firsts = samples.starts
            rows = samples.rows[firsts[:-1]]
        if not self._is_looked_up:
            self._look_up(plan, () if samples is None else samples.seq_ids, rows)
        self._is_looked_up = False
        sections = super().stage(plan, batch, samples, upload)
        followed = np.flatnonzero(self._texts.are_followed[rows])
        step = None
        if len(followed):
            most = self._arena.drafts.max_drafts
            told = np.clip(self._lengths[rows[followed]] - self._texts.num_unknown, 0, most)
            owners = self._texts.owners[rows[followed]]
            step = SampledTexts(followed.tolist(), rows[followed], owners, firsts.tolist(), told.tolist())
        self._texts.unread.append(step)
        return replace(sections, texts=step, num_ready=[0] * len(rows))

    def _find(
        self, samples: tuple[torch.Tensor, torch.Tensor, torch.Tensor], sections: DraftSections
    ) -> Sequence[Deferred[Any]]:
        if self._looks_up_on_device:
            return super()._find(samples, sections)
        return [ready(list(sections.num_ready))]

    def accept(
        self, chosen: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, sections: DraftSections, upload: Upload
    ) -> Accepted:
        accepted, step = super().accept(chosen, rows, lengths, sections, upload), sections.texts
        if step is None:
            return accepted
        counts, found = accepted.counts, accepted.found
        assert counts is not None, "a device counts"
        assert found is not None, "each sample has a number of drafts"

        def read(hosts: Iterator[torch.Tensor]) -> list[int]:
            token_ids, num_tokens = next(hosts)[:, 0].tolist(), next(hosts).tolist()
            told = found.read(hosts)
            firsts = [step.firsts[index] for index in step.indices]
            ends = [first + num_tokens[index] for first, index in zip(firsts, step.indices, strict=True)]
            step.tokens = [token_ids[first:end] for first, end in zip(firsts, ends, strict=True)]
            for index, count in zip(step.indices, step.num_drafts, strict=True):
                told[index] = max(told[index], count)
            return told

        return accepted._replace(found=Deferred((chosen, *counts.tensors, *found.tensors), read))


def path_length(max_drafts: int, queue_depth: int) -> int:
    return max_drafts + (queue_depth - 1) * (max_drafts + 1)
