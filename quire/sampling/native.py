"""The sampler back end of the native kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.kernels.cpu.runtime import NativeRuntime
from quire.kernels.cpu.sampling import MOST_RANKED, VocabularyKernels
from quire.sampling.batch import SampleBatch
from quire.sampling.errors import NonFiniteLogitsError
from quire.sampling.parameters import Feature, SamplingRows
from quire.sampling.plain import best_tokens
from quire.step import TokenLogprobs


class NativeSampler:
    """One kernel call for a batch, whatever its rows ask for."""

    def __init__(self, rows: SamplingRows, runtime: NativeRuntime) -> None:
        self._kernels = VocabularyKernels(runtime, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed)

    def choose(self, scores: np.ndarray, batch: SampleBatch, used: int) -> np.ndarray:
        greedy = not used & Feature.RANDOM
        token_ids, sound = self._kernels.choose(scores, batch.rows, batch.num_generated, greedy=greedy)
        if not sound:
            raise NonFiniteLogitsError(np.flatnonzero(token_ids < 0).tolist())
        return token_ids

    def logprobs(self, logits: np.ndarray, token_ids: np.ndarray, num_top: Sequence[int]) -> list[TokenLogprobs]:
        chosen, ranks, top_tokens, top_values = self._kernels.rank(logits, token_ids, max(num_top, default=0))
        bad = np.flatnonzero(np.isnan(chosen))
        if bad.size:
            raise NonFiniteLogitsError(bad.tolist())
        columns = (token_ids, chosen, top_tokens, top_values, ranks)
        entries = zip(*(column.tolist() for column in columns), num_top, strict=True)
        return [
            TokenLogprobs([token, *tokens[:count]], [value, *values[:count]], rank)
            for token, value, tokens, values, rank, count in entries
        ]

    def best(self, scores: np.ndarray, num_best: int) -> np.ndarray:
        if num_best > MOST_RANKED:
            return best_tokens(scores, num_best)
        return self._kernels.rank(scores, scores.argmax(axis=1), num_best)[2]
