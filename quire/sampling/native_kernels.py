"""The native kernels of a CPU: one call for a batch, whatever its rows ask for. Rules are the plain kernels'."""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.runtime import NativeRuntime
from quire.kernels.cpu.sampling import MOST_RANKED, VocabularyKernels
from quire.sampling.parameters import Feature, SamplingRows
from quire.sampling.plain_kernels import PlainKernels
from quire.sampling.results import Best, Ranking
from quire.sampling.rules import HostBatch


class NativeKernels(PlainKernels):
    """See `quire.sampling.kernels.SamplingKernels`."""

    def __init__(self, rows: SamplingRows, runtime: NativeRuntime) -> None:
        super().__init__(rows)
        self._kernels = VocabularyKernels(runtime, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed)

    def _choose(self, scores: np.ndarray, batch: HostBatch, used: int) -> tuple[np.ndarray, bool]:
        return self._kernels.choose(scores, batch.rows, batch.num_generated, greedy=not used & Feature.RANDOM)

    def _rank(self, logits: np.ndarray, token_ids: np.ndarray, num_top: int) -> Ranking:
        logprobs, ranks, top_tokens, top_logprobs = self._kernels.rank(logits, token_ids, num_top)
        return Ranking(~np.isnan(logprobs), token_ids, logprobs, ranks, Best(top_tokens, top_logprobs))

    def _best(self, scores: np.ndarray, num_best: int) -> np.ndarray:
        if num_best > MOST_RANKED:
            return super()._best(scores, num_best)
        return self._kernels.rank(scores, scores.argmax(axis=1), num_best)[2]
