"""Input batch of a step: columns on the host, made without a Python loop over tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from quire.worker.overlays import StepOverlay
    from quire.worker.request_state import RequestState


class InputBatch(NamedTuple):
    """S scheduled sequences with T tokens, in the plan's order; the worker builds it for each step. rows, starts,
    counts, ends: [S] int64: request slot, first computed position, number of positions, position after the last.
    query_start: [S + 1] int64: tokens of sequence s are query_start[s]:query_start[s + 1]. logits_rows: [R] int64,
    ascending, tokens whose hidden states are read (None: all T). read_start: [S + 1] int64, start of each sequence's
    part of the R. rows_version: equal versions other than 0 mean equal rows. num_drafts: [S] int64, last tokens that
    are drafts (None: none). overlay: rows that replace embeddings (None: none)."""

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    ends: np.ndarray
    query_start: np.ndarray
    logits_rows: np.ndarray | None
    read_start: np.ndarray
    rows_version: int = 0
    num_drafts: np.ndarray | None = None
    overlay: StepOverlay | None = None

    @classmethod
    def of(cls, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> InputBatch:
        """Batch whose T tokens are all read."""
        query_start = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=query_start[1:])
        return cls(rows, starts, counts, starts + counts, query_start, None, query_start)

    @classmethod
    def of_plan(cls, rows: np.ndarray, starts: Sequence[int], counts: Sequence[int]) -> InputBatch:
        """Same as `of`, for lists of numbers from a plan."""
        return cls.of(rows, np.array(starts, np.int64), np.array(counts, np.int64))

    @classmethod
    def dummy_prompts(cls, num_tokens: int, longest: int) -> InputBatch:
        """Batch for profiling: `num_tokens` in new sequences of `longest` tokens, the last maybe shorter."""
        starts = np.arange(0, num_tokens, longest)
        return cls.of(np.arange(len(starts)), np.zeros_like(starts), np.minimum(num_tokens - starts, longest))

    @classmethod
    def dummy_decodes(cls, num_seqs: int, longest: int) -> InputBatch:
        """Batch for profiling: one new token of each sequence, the last of `longest`."""
        return cls.of(np.arange(num_seqs), np.full(num_seqs, longest - 1), np.ones(num_seqs, np.int64))

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])

    @property
    def num_read(self) -> int:
        """R, the number of tokens whose hidden states are read (for logits, pooling or drafts)."""
        return int(self.read_start[-1])

    @property
    def max_query_len(self) -> int:
        """Maximum tokens of a sequence in this step; 1 for a padding-only batch."""
        return int(self.counts.max(initial=1))

    @property
    def is_decode(self) -> bool:
        """True if each sequence has one new token, plus drafts. Such batches use full CUDA graphs."""
        return self.num_tokens == len(self.rows) + (0 if self.num_drafts is None else int(self.num_drafts.sum()))

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest sequence after this step."""
        return int(self.ends.max(initial=0))

    @property
    def sequence_index(self) -> np.ndarray:
        """Sequence index of each token, [T] int64."""
        return np.repeat(np.arange(len(self.rows)), self.counts)

    @property
    def positions(self) -> np.ndarray:
        """Position of each token in its sequence, [T] int64."""
        return np.arange(self.num_tokens) + np.repeat(self.starts - self.query_start[:-1], self.counts)


def build_input_batch(
    seq_ids: Sequence[int],
    start_positions: Sequence[int],
    num_tokens: Sequence[int],
    requests: RequestState,
    num_drafts: np.ndarray | None = None,
) -> InputBatch:
    """Build the batch. Every scheduled token must be known, sampled by an earlier step, or a draft. num_drafts: see
    InputBatch."""
    lengths = requests.lengths
    if num_drafts is None:
        for seq_id, start, count in zip(seq_ids, start_positions, num_tokens, strict=True):
            assert start + count <= lengths[seq_id], "the plan schedules a token that no step has sampled"
    rows = requests.rows_of(seq_ids)
    batch = requests.columns.input_batch(rows, start_positions, num_tokens, requests.rows_version)
    if sum(num_tokens) == len(num_tokens):  # decodes, as in most steps: all tokens are read
        return batch
    if num_drafts is not None:
        batch = batch._replace(num_drafts=num_drafts)
    return _reading_less(batch, requests.sampling.rows_with_prompt_logprobs)


def _reading_less(batch: InputBatch, scored: Collection[int]) -> InputBatch:
    counts, query_start = batch.counts, batch.query_start
    num_read = np.ones_like(counts) if batch.num_drafts is None else batch.num_drafts + 1
    if scored:
        num_read = np.where(np.isin(batch.rows, list(scored)), counts, num_read)
    read_start = np.zeros_like(query_start)
    np.cumsum(num_read, out=read_start[1:])
    if read_start[-1] == batch.num_tokens:
        return batch
    logits_rows = np.arange(read_start[-1]) + np.repeat(query_start[1:] - read_start[1:], num_read)
    return batch._replace(logits_rows=logits_rows, read_start=read_start)
