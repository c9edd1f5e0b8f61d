"""Log-probabilities of prompt tokens, chunk after chunk, for the rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.models.interface import CausalLM
from quire.sampling.errors import NonFiniteLogitsError
from quire.sampling.sampler import Sampler
from quire.step import PromptLogprobs, TokenLogprobs
from quire.worker.input_batch import InputBatch
from quire.worker.request_state import RequestState


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """found: batch index -> log-probabilities. nonfinite: batch indices of prompts with a NaN or infinite logit."""

    found: dict[int, PromptLogprobs]
    nonfinite: Sequence[int] = ()


NOTHING_SCORED = ScoredPrompts({})


class PromptScorer:
    """slice_rows: most positions whose logits exist at a time."""

    def __init__(self, model: CausalLM, sampler: Sampler[np.ndarray], slice_rows: int) -> None:
        self._model = model
        self._sampler = sampler
        self._slice_rows = slice_rows

    def score(self, hidden: torch.Tensor, batch: InputBatch, requests: RequestState) -> ScoredPrompts:
        """Of the prompt tokens that this step's positions predict (position p predicts p + 1).

        hidden: [T, hidden size].
        """
        asked = requests.sampling.rows_with_prompt_logprobs
        if not asked:
            return NOTHING_SCORED
        found: dict[int, PromptLogprobs] = {}
        nonfinite = []
        for index, row in enumerate(batch.rows.tolist()):
            if row not in asked:
                continue
            start = int(batch.starts[index])
            num_predicted = min(batch.ends[index], requests.num_prompt_tokens[row] - 1) - start
            if num_predicted <= 0:
                continue
            first = int(batch.first_index[index])
            targets = requests.token_ids[row, start + 1 : start + 1 + num_predicted].astype(np.int64)
            num_top = int(requests.sampling.num_prompt_logprobs[row])
            try:
                entries = self._by_slices(hidden[first : first + num_predicted], targets, num_top)
            except NonFiniteLogitsError:
                nonfinite.append(index)
                continue
            found[index] = PromptLogprobs(start + 1, entries)
        return ScoredPrompts(found, nonfinite)

    def _by_slices(self, hidden: torch.Tensor, targets: np.ndarray, num_top: int) -> list[TokenLogprobs]:
        """hidden: [N, hidden size]; targets: [N] int64."""
        entries: list[TokenLogprobs] = []
        for first in range(0, len(targets), self._slice_rows):
            tokens = targets[first : first + self._slice_rows]
            logits = self._model.compute_logits(hidden[first : first + self._slice_rows])
            entries += self._sampler.logprobs(logits, tokens, num_top).assemble()
        return entries
