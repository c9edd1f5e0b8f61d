"""Native kernels of a CPU: one call per batch, whatever its rows ask for. Rules other than masks are the plain
kernels'."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.kernels.cpu.runtime import NativeRuntime
from quire.kernels.cpu.sampling import MOST_RANKED, VocabularyKernels
from quire.sampling.batch import TokenMasks
from quire.sampling.parameters import Asked, Feature, SamplingRows
from quire.sampling.plain_kernels import PlainKernels
from quire.sampling.results import Best, Deferred, Ranking, ready
from quire.sampling.rules import HostBatch


class NativeKernels(PlainKernels):
    def __init__(self, rows: SamplingRows, runtime: NativeRuntime) -> None:
        super().__init__(rows)
        self._kernels = VocabularyKernels(runtime, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed)
        self._logits = torch.empty(0, 0)
        self._scores = self._logits.numpy()

    def set_aside(self, logits: torch.Tensor, used: int, asked: Asked | None) -> tuple[np.ndarray, np.ndarray]:
        if logits is not self._logits:  # most steps bring the tensor of the last one
            self._logits, self._scores = logits, logits.numpy()
        return self._scores, self._scores if asked is None else self._scores[asked.indices]

    def keep_masked(self, scores: np.ndarray, masks: TokenMasks) -> None:
        self._kernels.keep_masked(scores, masks.indices, np.ascontiguousarray(masks.words, np.uint32))

    def choose(self, scores: np.ndarray, batch: HostBatch, used: int) -> Deferred[list[int]]:
        _, rows, lengths, num_prompt_tokens, table = batch
        return ready(self._kernels.choose(scores, rows, lengths, num_prompt_tokens, table, not used & Feature.RANDOM))

    def rank(
        self, logits: np.ndarray, token_ids: np.ndarray, batch: HostBatch, asked: Asked, *, normalized: bool
    ) -> Deferred[Ranking]:
        if max(asked.counts) <= MOST_RANKED:
            return super().rank(logits, token_ids, batch, asked, normalized=normalized)
        # Rows that ask for more than the kernel ranks use code whose last bits differ; other rows must not.
        counts = np.asarray(asked.counts)
        parts = [np.flatnonzero(counts <= MOST_RANKED), np.flatnonzero(counts > MOST_RANKED)]
        rows, tokens = logits, token_ids[asked.indices]
        rankings = [
            (part, self._rank(rows[part], tokens[part], counts[part].max(), normalized=normalized))
            for part in parts
            if len(part)
        ]
        return ready(_joined(rankings))

    def _rank(self, logits: np.ndarray, token_ids: np.ndarray, num_top: int, *, normalized: bool) -> Ranking:
        if num_top > MOST_RANKED:
            return super()._rank(logits, token_ids, num_top, normalized=normalized)
        values, ranks, top_tokens, top_values = self._kernels.rank(logits, token_ids, num_top)
        is_sound = ~np.isnan(values)
        if not normalized:
            top_tokens[~is_sound] = 0
            values, top_values = (np.take_along_axis(logits, each, 1) for each in (token_ids[:, None], top_tokens))
            values = values[:, 0]
        return Ranking(is_sound, token_ids, values, ranks, Best(top_tokens, top_values))

    def _best(self, scores: np.ndarray, num_best: int) -> np.ndarray:
        if num_best > MOST_RANKED:
            return super()._best(scores, num_best)
        return self._kernels.rank(scores, scores.argmax(axis=1), num_best)[2]


def _joined(parts: Sequence[tuple[np.ndarray, Ranking]]) -> Ranking:
    places = np.concatenate([place for place, _ in parts])
    width = max(ranking.best.token_ids.shape[1] for _, ranking in parts)
    best = [[np.pad(column, ((0, 0), (0, width - column.shape[1]))) for column in ranking.best] for _, ranking in parts]
    order = np.argsort(places)
    sound, tokens, logprobs, ranks = (
        np.concatenate(column)[order] for column in zip(*(ranking[:4] for _, ranking in parts), strict=True)
    )
    best_tokens, best_values = (np.concatenate(column)[order] for column in zip(*best, strict=True))
    return Ranking(sound, tokens, logprobs, ranks, Best(best_tokens, best_values))
