"""The worker's half of drafts: what it looks up for a sequence's next step, and how many of a step's drafts are kept.

A draft is accepted where it equals the token that is drawn in its place, which depends on the seed and the place alone:
a sequence gets the tokens that it gets without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from quire.config.model_shape import STATE_BORDER
from quire.layers.batch import ForwardResult
from quire.sampling.results import Deferred, SampledTokens
from quire.step import StepPlan, StepResult
from quire.worker.finders import Finder
from quire.worker.pooling import generated_samples

if TYPE_CHECKING:
    from quire.worker.input_batch import InputBatch
    from quire.worker.request_state import RequestState

PATIENCE, STRIDE = 64, 4
"""After PATIENCE look-ups in a row that found nothing, one step in STRIDE looks up: text that does not repeat
itself costs less, and text that begins to is found a few tokens later."""


class Placed(NamedTuple):
    """Where the S scheduled sequences of a step start, what they compute, and how many of these tokens are drafts: the
    last ones, which are in the token table."""

    starts: Sequence[int]
    counts: Sequence[int]
    num_drafts: np.ndarray


class Accepted(NamedTuple):
    """The drafts of N samples in result order. counts: tokens that each gets (None: one each). found: how many drafts
    each has for its next step (None: there are none). token_ids: these drafts, [N, most drafts], in a step that expects
    masks (else None)."""

    counts: Deferred[list[int]] | None = None
    found: Deferred[list[int]] | None = None
    token_ids: Deferred[list[list[int]]] | None = None


NOTHING_ACCEPTED = Accepted()


class HostDrafts:
    """Drafts of a CPU's rows, of which the host knows all tokens."""

    writes_blocks = False
    """Making drafts writes to the KV cache."""
    follows = False
    """Drafts are made from what steps compute of all their tokens (`take`, `follow`)."""
    reads_all = False
    """It reads the model's results, which a step then computes of all tokens."""
    taps: tuple[int, ...] = ()
    """Layers whose results are read."""

    def __init__(self, num_rows: int, max_drafts: int, finder: Finder, *, has_states: bool) -> None:
        """has_states: of a model whose states are kept at borders: no draft may be the last token before one."""
        self.finder = finder
        self._has_states = has_states
        self._drafts = np.zeros((num_rows, max_drafts), np.int32)
        self._counts = np.zeros(num_rows, np.int64)
        self._placed: dict[int, list[int]] = {}
        self._num_fruitless = 0
        """Look-ups that were due since one found something."""

    def place(self, plan: StepPlan, requests: RequestState) -> Placed:
        """Write the plan's drafts, or those that were found for it, behind the known tokens of their sequences."""
        starts, counts, num_drafts = list(plan.start_positions), list(plan.num_tokens), [0] * len(plan.seq_ids)
        self._placed = {}
        for index, seq_id in enumerate(plan.seq_ids):
            wanted = plan.num_drafts[index] if plan.num_drafts else 0
            starts[index] = start = min(starts[index], requests.lengths[seq_id] - 1)
            if not wanted:
                continue
            row, length = requests.row_of(seq_id), start + counts[index] - wanted
            tokens = plan.drafts.get(seq_id)
            if tokens is None:
                tokens = self._found(row, length, wanted)
            if self._has_states:
                wanted = min(wanted, STATE_BORDER - 1 - (start + 1) % STATE_BORDER)
            tokens = tokens[:wanted]
            counts[index], num_drafts[index] = length - start + len(tokens), len(tokens)
            if tokens:
                requests.columns.write_tokens(row, length, tokens)
                self._placed[index] = tokens
        return Placed(starts, counts, np.array(num_drafts, np.int64))

    def forget(self, row: int) -> None:
        """Note that a row begins anew, as that of another sequence."""

    def copy(self, source: int, destination: int) -> None:
        """Note that a row begins as a copy of another."""

    def _found(self, row: int, length: int, wanted: int) -> list[int]:
        """The drafts that a row of `length` known tokens has: `wanted`, or another number."""
        tokens: list[int] = self._drafts[row, : self._counts[row]].tolist()
        return tokens

    def make(self, batch: InputBatch, table: np.ndarray) -> bool:
        """Make the drafts of a step's batch that have not been looked up, behind its block copies; returns whether
        tokens of the batch have changed in the token table."""
        return False

    def take(self, result: ForwardResult[torch.Tensor]) -> None:
        """Keep what is read of a step's forward pass, where `follows`, until `follow`."""

    def follow(self, batch: InputBatch, lengths: np.ndarray, table: np.ndarray) -> None:
        """Take in the step whose samples are known, where `follows`. lengths: tokens that its sequences have by now,
        [S]."""

    def accept(self, chosen: Sequence[int], sources: Sequence[int]) -> list[int]:
        """How many tokens each sample gets. chosen: a token for each of its rows, -1 for one without a finite score,
        before which a sequence ends its step. sources: indices of the samples into the batch."""
        found, first = [], 0
        for source in sources:
            drafts = self._placed.get(source, ())
            tokens = chosen[first : first + 1 + len(drafts)]
            first += len(tokens)
            count = 1
            while count < len(tokens) and tokens[count - 1] == drafts[count - 1] and tokens[count] >= 0:
                count += 1
            found.append(count)
        return found

    def tokens_of(self, rows: np.ndarray) -> list[list[int]]:
        """What the last look-up found for rows, [R, most drafts]."""
        tokens: list[list[int]] = self._drafts[rows].tolist()
        return tokens

    def look_up(
        self, rows: np.ndarray, ends: np.ndarray, table: np.ndarray, needed: Sequence[int] = ()
    ) -> list[int] | None:
        """Find drafts for rows of `ends` + 1 tokens; how many each has, None where no row has any, or none was looked
        for (`PATIENCE`). needed: indices of rows whose drafts must be known now (`tokens_of`)."""
        self._num_fruitless = number = self._num_fruitless + 1
        if number > PATIENCE and number % STRIDE:
            return None
        if not self.finder.find_drafts(table, rows, ends + 1, self._drafts, self._counts):
            return None
        self._num_fruitless = 0
        found: list[int] = self._counts[rows].tolist()
        return found


def note_found(result: StepResult, plan: StepPlan, counts: Sequence[int], tokens: Sequence[list[int]]) -> None:
    """Add what was found for the next step to a result. counts, tokens (those of a step that expects masks): of the
    samples that are not pooled, as Accepted has them."""
    expected = set(plan.expects_sampling_inputs)
    for place, (index, count) in enumerate(zip(generated_samples(plan), counts, strict=True)):
        if count:
            result.found_drafts[index] = count
            if index in expected:
                result.draft_token_ids[index] = tokens[place][:count]


def add_accepted(result: StepResult, found: SampledTokens, firsts: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Add the tokens of samples with several rows each to a result. firsts: where the rows of each begin, and their
    number. counts: tokens that each gets. Returns the indices of samples that are not finite: of others the tokens
    before a row that is not are kept, and the next step comes upon it."""
    unsound, nonfinite = set(found.nonfinite), []
    for index, (first, count) in enumerate(zip(firsts, counts, strict=False)):
        rows = range(first, first + count)
        end = next((row for row in rows if row in unsound), rows.stop)
        if end == first:
            nonfinite.append(index)
            end = first + 1
        result.token_ids.append(list(found.token_ids[first:end]))
        if first in found.logprobs:
            result.logprobs[index] = [found.logprobs[row] for row in range(first, end)]
        if first in found.candidates:
            result.candidates[index] = found.candidates[first]
    result.num_drafts = firsts[-1] - len(counts)
    return nonfinite
