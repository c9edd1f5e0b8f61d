"""Worker's half of drafts. A draft is accepted if it equals the token sampled at its position, so drafts never change a
sequence's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    from quire.worker.oracle import Oracle
    from quire.worker.request_state import RequestState

PATIENCE, STRIDE, MOST_STRIDES = 64, 4, 4
"""Each PATIENCE look-ups in a row without a result add STRIDE steps between two look-ups, MOST_STRIDES times."""


class Placed(NamedTuple):
    """Start positions and token counts of a step's S sequences, and the number of each one's last tokens that are
    drafts (already in the token table)."""

    starts: Sequence[int]
    counts: Sequence[int]
    num_drafts: np.ndarray


class Accepted(NamedTuple):
    """Accepted drafts of N samples in result order. counts: tokens per sample (None: one each). found: drafts per
    sample for its next step (None: none). token_ids: these drafts, [N, max drafts], in a step that expects masks or
    tells all (else None)."""

    counts: Deferred[list[int]] | None = None
    found: Deferred[list[int]] | None = None
    token_ids: Deferred[list[list[int]]] | None = None


NOTHING_ACCEPTED = Accepted()


Overwrite = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Type of `Oracle.overwrite`."""


def _as_made(rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return tokens


class HostDrafts:
    """Makes and verifies drafts on a CPU, where the host knows all tokens."""

    writes_blocks = False
    """True if making drafts writes to the KV cache."""
    follows = False
    """True if drafts are made from what steps compute (`take`, `follow`)."""
    reads_all = False
    """True if the last layer computes all tokens for it."""
    taps: tuple[int, ...] = ()
    """Numbers of the layers whose results it reads."""

    def __init__(self, num_rows: int, max_drafts: int, finder: Finder, *, has_states: bool) -> None:
        """has_states: True for a model with recurrent states, kept at borders (STATE_BORDER); no draft may be the last
        token before one."""
        self.finder = finder
        self._overwrite: Overwrite = _as_made
        self._has_states = has_states
        self._drafts = np.zeros((num_rows, max_drafts), np.int32)
        self._counts = np.zeros(num_rows, np.int64)
        self._placed: dict[int, list[int]] = {}
        self._num_fruitless = 0
        """Look-ups since the last that found something."""
        self.num_skipped = 0
        """Next steps without drafts that do not look up."""

    def place(self, plan: StepPlan, requests: RequestState) -> Placed:
        """Write the plan's drafts, or those found by this rank, into the token table after their sequences' known
        tokens."""
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

    def follow_oracle(self, oracle: Oracle) -> None:
        """Replace the drafts by those of an oracle, from the first step on."""
        self.finder, self._overwrite = oracle, oracle.overwrite

    def forget(self, row: int) -> None:
        """Reset a row's drafts as another sequence takes it."""

    def copy(self, source: int, destination: int) -> None:
        """Reset the drafts of a row that starts as a copy of another (a fork)."""

    def _found(self, row: int, length: int, wanted: int) -> list[int]:
        tokens: list[int] = self._drafts[row, : self._counts[row]].tolist()
        return tokens

    def make(self, batch: InputBatch, table: np.ndarray) -> bool:
        """Compute the batch's missing drafts with a draft model or head, after its block copies. Returns whether tokens
        of the batch changed in the token table."""
        return False

    def keep_results(self, result: ForwardResult[torch.Tensor]) -> None:
        """Keep the hidden states of a step that `follow` needs. Only called if `follows`."""

    def follow(self, batch: InputBatch, lengths: np.ndarray, table: np.ndarray) -> None:
        """Compute a step's tokens with the draft head (if `follows`), once its samples are known. lengths: known tokens
        of its sequences, [S]."""

    def accept(self, chosen: Sequence[int], sources: Sequence[int]) -> list[int]:
        """Number of tokens that each sample gets: its sampled one and accepted drafts. chosen: sampled token per row,
        -1 without a finite score, which ends the sequence's step. sources: indices of the samples in the batch."""
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
        """Drafts of rows from the last `look_up`, [R, max drafts]. For the step's result."""
        tokens: list[list[int]] = self._drafts[rows].tolist()
        return tokens

    def look_up(
        self, rows: np.ndarray, ends: np.ndarray, table: np.ndarray, needed: Sequence[int] = ()
    ) -> list[int] | None:
        """Find drafts in texts for rows with `ends` + 1 tokens. Returns their number for each row; None: no row has
        any. needed: indices of rows whose drafts must be known now (`tokens_of`)."""
        if not self.finder.find_drafts(table, rows, ends + 1, self._drafts, self._counts):
            self._num_fruitless += 1
            self.num_skipped = num_to_skip(self._num_fruitless)
            return None
        self._num_fruitless = 0
        found: list[int] = self._counts[rows].tolist()
        return found


def num_to_skip(num_fruitless: int) -> int:
    """Number of next steps without a look-up, behind `num_fruitless` fruitless ones in a row."""
    return max(0, STRIDE * min(MOST_STRIDES, num_fruitless // PATIENCE) - 1)


def note_found(
    result: StepResult, plan: StepPlan, counts: Sequence[int], tokens: Sequence[list[int]], *, tells_all: bool
) -> None:
    """Add the next step's drafts to a result. counts, tokens: for the samples not pooled, as in Accepted. tells_all:
    see StepCompute."""
    expected = set(range(len(plan.sample_seq_ids)) if tells_all else plan.masked_samples)
    for place, (index, count) in enumerate(zip(generated_samples(plan), counts, strict=True)):
        if count:
            result.found_drafts[index] = count
            if index in expected:
                result.draft_token_ids[index] = tokens[place][:count]


def add_accepted(result: StepResult, found: SampledTokens, firsts: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Add the tokens of samples with several rows to a result. firsts: first row of each, and the number of rows.
    counts: tokens per sample. Returns indices of non-finite samples; if only a later row is, the tokens before it are
    kept."""
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
