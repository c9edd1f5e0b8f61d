"""Candidates to continue a beam: the tokens of the best scores, a score being a log-probability that rules changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.sampling.backend import SamplerBackend
from quire.sampling.logprobs import log_probabilities
from quire.sampling.rules import BANNED_SCORE
from quire.step import Candidates

LOWEST_SCORE = float(BANNED_SCORE) / 2
"""Scores below this one belong to banned tokens: neither the model nor other rules produce one as low."""


def normalize(logits: np.ndarray) -> np.ndarray:
    """[N, vocab_size] float32 -> their log-probabilities, in a new array. The rules act on these, as in Transformers,
    so that they do not raise what they leave alone."""
    return log_probabilities(torch.from_numpy(logits)).numpy()


def best_candidates(scores: np.ndarray, num_candidates: Sequence[int], backend: SamplerBackend) -> list[Candidates]:
    """scores: [N, vocab_size] float32, without NaN or plus infinity. num_candidates: for each row, how many at most;
    a row has one even if everything is forbidden."""
    # Best first and ties in a fixed order: a narrow row's are the first of a wide one's.
    token_ids = backend.best(scores, max(num_candidates))
    best_scores = np.take_along_axis(scores, token_ids, axis=1)
    num_allowed = np.maximum(1, (best_scores > LOWEST_SCORE).sum(axis=1)).tolist()
    columns = zip(token_ids.tolist(), best_scores.tolist(), num_candidates, num_allowed, strict=True)
    return [
        Candidates(tokens[: min(wanted, allowed)], values[: min(wanted, allowed)])
        for tokens, values, wanted, allowed in columns
    ]
