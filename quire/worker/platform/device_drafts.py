"""Drafts on a device, where the host knows a sequence's token count only within bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from quire.config.model_shape import STATE_BORDER
from quire.config.speculation import SpeculationConfig
from quire.kernels.triton.drafts import NOT_COMPUTED, accept_drafts, find_drafts, place_drafts, recall_drafts
from quire.kernels.triton.rows import StepColumns
from quire.layers.batch import ForwardResult
from quire.sampling.results import Deferred
from quire.step import StepPlan
from quire.worker.drafts import Accepted, Placed
from quire.worker.input_batch import InputBatch
from quire.worker.oracle import Oracle
from quire.worker.platform.state_arena import StateArena
from quire.worker.platform.upload import Section, Upload
from quire.worker.request_state import RequestState
from quire.worker.sample_rows import SampleRows

if TYPE_CHECKING:
    from quire.worker.platform.device_text_drafts import HostTexts, SampledTexts


class Proposal(NamedTuple):
    """Tokens that the host proposes for a sequence. most: most drafts to take from them. start: number of the
    sequence's tokens before them; drafts begin behind those that it has by then."""

    token_ids: list[int]
    most: int
    start: int = NOT_COMPUTED


class NoTexts:
    """Texts of a drafter that keeps none on the host; `HostTexts` keeps them."""

    def write_tokens(self, row: int, position: int, token_ids: Sequence[int]) -> None: ...

    def copy_tokens(self, source: int, destination: int, num_tokens: int) -> None: ...

    def begin_text(self, row: int, num_tokens: int, scope: str, prediction: Sequence[int]) -> None: ...

    def copy_text(self, source: int, destination: int, num_tokens: int) -> None: ...

    def end_text(self, row: int, num_tokens: int) -> None: ...


NO_TEXTS = NoTexts()


@dataclass(frozen=True, slots=True)
class PassSections:
    """Draft model's pass at the start of a step. batch: its P sequences; starts and ends are upper bounds. columns:
    in the upload, request slots, indices into the step, [P], `InputBatch.query_start`, and tokens whose hidden states
    are read. num_guessing: number of its first sequences that get more than 0, 1, ... drafts."""

    batch: InputBatch
    columns: Sequence[Section]
    num_guessing: Sequence[int]


@dataclass(frozen=True, slots=True)
class DraftSections:
    """Step's draft data in the upload: arguments of `place_drafts`, and of `accept_drafts` (None: nothing is sampled)
    with the sources of sampled rows. tells_tokens: the host needs the drafts found. made: pass of a draft
    model or head. followed: step that a head follows; sequences of it that have samples of their own, [S]. num_ready:
    drafts for each sample's next step, where the host knows. texts: samples in texts on the host."""

    placed: Sequence[Section]
    accepted: Sequence[Section] | None
    tells_tokens: bool = False
    made: PassSections | None = None
    followed: tuple[InputBatch, Section] | None = None
    num_ready: Sequence[int] = ()
    texts: SampledTexts | None = None


class DeviceDrafts:
    """Makes and verifies drafts on a device; here drafts are found in a sequence's own tokens, subclasses ask heads or
    models."""

    writes_blocks = False
    reads_all = False
    taps: tuple[int, ...] = ()

    def __init__(self, arena: StateArena, config: SpeculationConfig, queue_depth: int, *, has_states: bool) -> None:
        """has_states: see HostDrafts; no draft may be last before a state border, at any start that drafts in flight
        allow."""
        self._arena = arena
        self.oracle: Oracle | None = None
        """Source of all drafts, from the first step on, in a benchmark."""
        self._lookup = config.lookup_min, config.lookup_max
        self._has_states = has_states
        self._in_flight: deque[dict[int, int]] = deque(maxlen=queue_depth - 1)
        """Drafts by sequence, as planned, of plans whose results the scheduler may not have seen."""
        self._most_ahead = (queue_depth - 1) * (arena.drafts.max_drafts + 1)
        """Most tokens that a sequence gets in the other steps in flight."""
        self._given: dict[int, Proposal] = {}
        self.texts: NoTexts | HostTexts = NO_TEXTS
        """Tokens of the rows that the host knows."""
        self._shifts = torch.zeros(0, dtype=torch.int32, device=arena.words.device)
        self._token_ids = torch.zeros(0, dtype=torch.int64, device=arena.words.device)

    def place(self, plan: StepPlan, requests: RequestState) -> Placed:
        """Start positions (upper bounds, which the device corrects), token counts and numbers of drafts per sequence.
        Called before a plan's batch is built."""
        counts, num_drafts = list(plan.num_tokens), list(plan.num_drafts or [0] * len(plan.seq_ids))
        self._given = {}
        for index, (seq_id, start) in enumerate(zip(plan.seq_ids, plan.start_positions, strict=True)):
            wanted = num_drafts[index]
            if not wanted:
                continue
            given = self._proposal(plan, seq_id, requests.row_of(seq_id))
            if given is not None:
                wanted = min(wanted, given.most)
                self._given[index] = given
            wanted = min(wanted, self._most_behind_tokens(start + counts[index] - num_drafts[index]))
            if self._has_states:
                pending = self._pending(seq_id)
                places = [STATE_BORDER - 1 - (at + 1) % STATE_BORDER for at in range(start - pending, start + 1)]
                wanted = min(wanted, *places)
            counts[index] -= num_drafts[index] - wanted
            num_drafts[index] = wanted
        return Placed(plan.start_positions, counts, np.array(num_drafts, np.int64))

    def _proposal(self, plan: StepPlan, seq_id: int, row: int) -> Proposal | None:
        """Drafts that the host proposes for a sequence in `row`; None: it knows none, the device may have found
        some."""
        given = plan.drafts.get(seq_id)
        return None if given is None else Proposal(given, len(given))

    def _pending(self, seq_id: int) -> int:
        return sum(each.get(seq_id, 0) for each in self._in_flight)

    def _most_behind_tokens(self, num_tokens: int) -> int:
        return self._arena.drafts.max_drafts

    def forget(self, row: int) -> None:
        """Reset a row's drafts as another sequence takes it."""

    def copy(self, source: int, destination: int) -> None:
        """Reset the drafts of a row that starts as a copy of another (a fork)."""

    def stage(self, plan: StepPlan, batch: InputBatch, samples: SampleRows | None, upload: Upload) -> DraftSections:
        """Add the draft kernels' inputs to a step's upload."""
        num_seqs = len(batch.rows)
        num_drafts = np.zeros(num_seqs, np.int64) if batch.num_drafts is None else batch.num_drafts
        given, given_at, given_from = [0], np.full(num_seqs, -1), np.full(num_seqs, NOT_COMPUTED)
        if batch.num_drafts is not None:
            for index, proposal in self._given.items():
                given_at[index], given_from[index] = len(given), proposal.start
                given += proposal.token_ids
        self._given = {}
        # The scheduler counts the drafts of its plan, also those that `place` has left out.
        self._in_flight.append(dict(zip(plan.seq_ids, plan.num_drafts or [0] * len(plan.seq_ids), strict=True)))
        placed = [upload.add(column) for column in (num_drafts, given_at, given_from, np.array(given))]
        if samples is None:
            return DraftSections(placed, None)
        firsts = samples.starts
        sources = np.repeat(np.array(samples.sources), np.diff(firsts))
        tokens_at = samples.last_index if batch.logits_rows is None else batch.logits_rows[samples.last_index]
        accepted = [upload.add(column) for column in (firsts, tokens_at, sources)]
        return DraftSections(placed, accepted, bool(plan.masked_samples))

    def apply(self, columns: StepColumns, sections: DraftSections, upload: Upload) -> None:
        """Enqueue the writing of drafts, after earlier steps' sampling; corrects the starts in `columns`."""
        self._shifts = torch.empty_like(columns.starts)
        place_drafts(
            self._arena.words,
            self._arena.drafts,
            (columns.rows, columns.starts, columns.query_start),
            tuple(map(upload.view, sections.placed)),
            self._shifts,
            self._most_ahead,
        )

    def make(self, columns: StepColumns, sections: DraftSections, upload: Upload) -> None:
        """Enqueue the making of drafts, after `apply` and block copies."""

    def keep_results(self, result: ForwardResult[torch.Tensor]) -> None:
        """Keep the hidden states of a step that `follow` needs."""

    def follow(self, columns: StepColumns, sections: DraftSections, upload: Upload) -> None:
        """Enqueue the draft head's pass over the step's tokens, after their acceptance."""

    def prepare(self, max_num_tokens: int) -> None:
        """Compile and capture what making drafts needs. At the worker's start."""

    def keep_token_ids(self, token_ids: torch.Tensor) -> None:
        """Keep the step's tokens for the head: [T] int64, at a stable address."""
        self._token_ids = token_ids

    def correct_lengths(self, lengths: torch.Tensor, sections: DraftSections, upload: Upload) -> torch.Tensor:
        """Lengths of the sampled rows, [R], without drafts that earlier steps rejected."""
        assert sections.accepted is not None, "rows are sampled"
        return lengths - self._shifts.index_select(0, upload.view(sections.accepted[2]))

    def accept(
        self, chosen: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, sections: DraftSections, upload: Upload
    ) -> Accepted:
        """Keep the drafts that equal the sampled tokens (`ComputeStep.accept`). chosen: [R, 2] int32, from the sampling
        kernels."""
        assert sections.accepted is not None, "rows are sampled"
        arena = self._arena
        firsts, tokens_at, _ = map(upload.view, sections.accepted)
        samples = rows, lengths, firsts, tokens_at
        counts, ends = accept_drafts(arena.words, arena.drafts, chosen, samples, self._token_ids)
        return Accepted(_on_host(counts), *self._find((rows, firsts, ends), sections))

    def _find(
        self, samples: tuple[torch.Tensor, torch.Tensor, torch.Tensor], sections: DraftSections
    ) -> Sequence[Deferred[Any]]:
        """Numbers of drafts for the samples' next step, and, where masks are expected, their tokens."""
        arena, (rows, firsts, _) = self._arena, samples
        if self.oracle is not None:
            results = [recall_drafts(arena.words, arena.drafts, samples)]
        else:
            results = [find_drafts(arena.words, arena.drafts, samples, self._lookup)]
        if sections.tells_tokens:
            tokens = arena.words[arena.drafts.found :].view(-1, arena.drafts.max_drafts)
            results.append(tokens.index_select(0, rows.index_select(0, firsts[:-1])))
        return list(map(_on_host, results))


def _on_host(values: torch.Tensor) -> Deferred[Any]:
    return Deferred((values,), lambda hosts: next(hosts).tolist())
