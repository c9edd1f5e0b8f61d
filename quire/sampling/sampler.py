"""The batched sampler for host memory: the order of its passes. Each pass has a file of its own.

A sampler back end does what touches the whole vocabulary; rules on single tokens work on a NumPy view of the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from quire.sampling.backend import SamplerBackend
from quire.sampling.batch import SampleBatch
from quire.sampling.candidates import best_candidates, normalize
from quire.sampling.errors import NonFiniteLogitsError
from quire.sampling.parameters import EDITS, NEEDS_INDEX_OF_ROW, Feature, SamplingRows
from quire.sampling.rules import (
    add_logit_bias,
    apply_output_penalties,
    apply_repetition_penalty,
    ban_stop_tokens,
    keep_allowed,
)
from quire.step import Candidates, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """token_ids: [R] int64, aligned with the batch. logprobs, candidates: by batch index, where asked for.
    nonfinite: indices of rows whose logits are NaN or infinite; they have some token, and neither of the others."""

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs]
    candidates: dict[int, Candidates]
    nonfinite: tuple[int, ...] = ()


class Sampler:
    """Chooses one token per row. Holds no state of its own: all of it is in the rows and the batch."""

    def __init__(self, rows: SamplingRows, backend: SamplerBackend) -> None:
        self._rows = rows
        self._backend = backend

    def sample(self, compute_logits: Callable[[], torch.Tensor], batch: SampleBatch) -> SampledTokens:
        """compute_logits: returns [R, vocab_size] float32 on the host, which may be overwritten.

        A row with NaN or plus infinity, or without any finite logit, is reported as nonfinite. The other rows are then
        sampled again without it and get the tokens they would have had alone, because sampling keeps no state.
        """
        nonfinite: set[int] = set()
        while True:
            logits = compute_logits()
            if nonfinite:
                logits[list(nonfinite)] = 0.0
            try:
                sampled = self._sample(logits, batch)
            except NonFiniteLogitsError as error:
                nonfinite.update(error.indices)
                continue
            if not nonfinite:
                return sampled
            for index in nonfinite:
                sampled.logprobs.pop(index, None)
                sampled.candidates.pop(index, None)
            return replace(sampled, nonfinite=tuple(sorted(nonfinite)))

    def _sample(self, logits: torch.Tensor, batch: SampleBatch) -> SampledTokens:
        """Raises NonFiniteLogitsError, which names at least one row with non-finite logits, not necessarily all."""
        rows = self._rows
        used = rows.used(batch.rows)
        scores = logits.numpy()
        # 1. Log-probabilities are the model's own: what they are computed from is set aside before anything changes.
        wants_logprobs, unchanged = np.empty(0, np.int64), scores
        if used & Feature.LOGPROBS:
            wants_logprobs = np.flatnonzero(rows.features[batch.rows] & Feature.LOGPROBS)
            unchanged = scores[wants_logprobs]
        # 2. Bias, penalties, bans, allowed tokens. Those of a beam change its log-probabilities.
        beams = np.empty(0, np.int64)
        if used & Feature.CANDIDATES:
            beams = np.flatnonzero(rows.features[batch.rows] & Feature.CANDIDATES)
            scores[beams] = normalize(scores[beams])
        if used & EDITS:
            self._edit(scores, batch, used)
        beam_scores = scores[beams]
        # 3. Greedy rows take the best score, the others draw.
        token_ids = self._backend.choose(scores, batch, used)
        # 4. What beams can go on with: the best token, which was just chosen for them, and the next ones.
        candidates = {}
        if beams.size:
            num_candidates = rows.num_candidates[batch.rows[beams]].tolist()
            found = best_candidates(beam_scores, num_candidates, self._backend)
            candidates = dict(zip(beams.tolist(), found, strict=True))
        # 5. Log-probabilities of what was chosen.
        if not used & Feature.LOGPROBS:
            return SampledTokens(token_ids, {}, candidates)
        num_top = rows.num_logprobs[batch.rows[wants_logprobs]].tolist()
        try:
            entries = self._backend.logprobs(unchanged, token_ids[wants_logprobs], num_top)
        except NonFiniteLogitsError as error:  # a token that the rules ban had a NaN or infinite logit
            raise NonFiniteLogitsError(wants_logprobs[list(error.indices)].tolist()) from None
        return SampledTokens(token_ids, dict(zip(wants_logprobs.tolist(), entries, strict=True)), candidates)

    def _edit(self, scores: np.ndarray, batch: SampleBatch, used: int) -> None:
        """Change the scores in place, in this order, by the features that the batch uses."""
        rows, where = self._rows, batch.rows
        index_of_row = rows.index_of_row(where) if used & NEEDS_INDEX_OF_ROW else np.empty(0, np.int64)
        if used & Feature.LOGIT_BIAS:
            add_logit_bias(scores, rows.logit_bias, index_of_row)
        if used & Feature.REPETITION_PENALTY:
            apply_repetition_penalty(scores, rows.repetition_penalty[where], batch)
        if used & Feature.OUTPUT_PENALTIES:
            apply_output_penalties(scores, rows.presence_penalty[where], rows.frequency_penalty[where], batch)
        if used & Feature.MIN_TOKENS:
            ban_stop_tokens(scores, rows.stop_tokens, rows.min_tokens[where], batch, index_of_row)
        if used & Feature.BAD_WORDS:
            rows.bad_words.apply(scores, batch, index_of_row)
        if used & Feature.ALLOWED_TOKENS:
            keep_allowed(scores, rows.allowed_tokens, index_of_row)
