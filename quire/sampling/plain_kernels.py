"""Plain kernels: NumPy on the scores, torch for log-probabilities; the others' reference, with a row's same bits in any
batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.sampling import rules
from quire.sampling.batch import TokenMasks
from quire.sampling.draw import compute_weights, cumulative_blocks, draw, uniform
from quire.sampling.filters import apply_filters, lowest_kept
from quire.sampling.parameters import Asked, Feature, Listed, SamplingRows
from quire.sampling.results import LOWEST_SCORE, Best, Deferred, Ranking, ready
from quire.sampling.rules import HostBatch

SLICE_ELEMENTS = 2**20
"""Approximate weights in a slice of random rows."""


class PlainKernels:
    def __init__(self, rows: SamplingRows) -> None:
        self._rows = rows

    def set_aside(self, logits: torch.Tensor, used: int, asked: Asked | None) -> tuple[np.ndarray, np.ndarray]:
        """(the logits themselves, a copy of the rows that ask for log-probabilities, [N, vocab_size])."""
        scores = logits.numpy()
        return scores, scores if asked is None else scores[asked.indices]

    def normalize(self, scores: np.ndarray, batch: HostBatch, beams: Asked) -> None:
        scores[beams.indices] = log_probabilities(scores[beams.indices]).numpy()

    def add_logit_bias(self, scores: np.ndarray, batch: HostBatch) -> None:
        rules.add_logit_bias(scores, self._rows.lists, batch)

    def apply_penalties(self, scores: np.ndarray, batch: HostBatch, used: int) -> None:
        rows, where = self._rows, batch.rows
        if used & Feature.REPETITION_PENALTY:
            rules.apply_repetition_penalty(scores, rows.repetition_penalty[where], batch)
        if used & Feature.OUTPUT_PENALTIES:
            rules.apply_output_penalties(scores, rows.presence_penalty[where], rows.frequency_penalty[where], batch)

    def ban_stop_tokens(self, scores: np.ndarray, batch: HostBatch) -> None:
        rules.ban_stop_tokens(scores, self._rows.lists, self._rows.min_tokens[batch.rows], batch)

    def ban_sequences(self, scores: np.ndarray, batch: HostBatch) -> None:
        rules.ban_sequences(scores, self._rows.lists, batch)

    def keep_allowed(self, scores: np.ndarray, batch: HostBatch) -> None:
        rules.keep_allowed(scores, self._rows.lists, batch)

    def keep_masked(self, scores: np.ndarray, masks: TokenMasks) -> None:
        rules.keep_masked(scores, masks)

    def choose(self, scores: np.ndarray, batch: HostBatch, used: int) -> Deferred[list[int]]:
        token_ids = self._choose(scores, batch, used)
        batch.token_table[batch.rows, batch.lengths] = np.maximum(token_ids, 0)
        return ready(token_ids.tolist())

    def chosen(self, token_ids: Deferred[list[int]]) -> np.ndarray:
        return np.maximum(np.array(token_ids.read(iter(())), np.int64), 0)

    def keep_edited(self, scores: np.ndarray, asked: Asked) -> np.ndarray:
        """Copy of the rows that ask for log-probabilities: [N, vocab_size]."""
        return scores[asked.indices]

    def process(self, scores: np.ndarray, token_ids: np.ndarray, batch: HostBatch, asked: Asked) -> np.ndarray:
        rows, where, count = self._rows, batch.rows[asked.indices], np.arange(len(scores))
        chosen = token_ids[asked.indices]
        filtered = np.flatnonzero(rows.features[where] & Feature.FILTERS)
        impossible = scores <= LOWEST_SCORE
        # A row with contradictory rules has only such tokens.
        impossible[impossible[count, chosen]] = False
        with np.errstate(all="ignore"):  # rows that are not sound are reported as such
            if filtered.size:
                at = where[filtered]
                weights = compute_weights(scores[filtered], rows.temperature[at])
                totals = cumulative_blocks(weights)[:, -1]
                weights = weights[:, : scores.shape[1]]
                lowest = lowest_kept(weights, totals, rows.top_k[at], rows.top_p[at], rows.min_p[at])
                # The native kernels round differently: a token that they drew at the edge is kept.
                lowest = np.minimum(lowest, weights[count[: len(at)], chosen[filtered]])
                impossible[filtered] |= weights < lowest[:, None]
            temperature = rows.temperature[where]
            scores /= np.where(temperature > 0, temperature, 1)[:, None]
        scores[impossible] = -np.inf
        return scores

    def rank(
        self, logits: np.ndarray, token_ids: np.ndarray, batch: HostBatch, asked: Asked, *, normalized: bool
    ) -> Deferred[Ranking]:
        return ready(self._rank(logits, token_ids[asked.indices], max(asked.counts), normalized=normalized))

    def compare_listed(
        self, logits: np.ndarray, token_ids: np.ndarray, listed: Listed, asked: Asked, *, normalized: bool
    ) -> Deferred[np.ndarray]:
        values = logits[listed.where, listed.token_ids]
        chosen = token_ids[asked.indices][listed.where]
        return ready(values - logits[listed.where, chosen] if normalized else values)

    def rank_tokens(
        self, logits: torch.Tensor, token_ids: np.ndarray, num_top: int, *, normalized: bool
    ) -> Deferred[Ranking]:
        return ready(self._rank(logits.numpy(), token_ids, num_top, normalized=normalized))

    def rank_beams(self, scores: np.ndarray, batch: HostBatch, beams: Asked) -> Deferred[Best]:
        scores = scores[beams.indices]
        scores[~np.isfinite(scores.max(axis=1))] = 0
        token_ids = self._best(scores, max(beams.counts))
        return ready(Best(token_ids, np.take_along_axis(scores, token_ids, axis=1)))

    def _choose(self, scores: np.ndarray, batch: HostBatch, used: int) -> np.ndarray:
        """[R] int64: tokens, -1 for rows with NaN, plus infinity or no finite score."""
        if not used & Feature.RANDOM:
            token_ids = _best_of_row(scores)
        elif not used & Feature.GREEDY:
            token_ids = self._draw(scores, np.arange(len(scores)), batch, used)
        else:
            is_random = (self._rows.features[batch.rows] & Feature.RANDOM) != 0
            greedy, random = np.flatnonzero(~is_random), np.flatnonzero(is_random)
            token_ids = np.empty(len(scores), np.int64)
            token_ids[greedy] = _best_of_row(scores[greedy])
            token_ids[random] = self._draw(scores, random, batch, used)
        return token_ids

    def _rank(self, logits: np.ndarray, token_ids: np.ndarray, num_top: int, *, normalized: bool) -> Ranking:
        """Ranking of each row, with `num_top` or more best tokens. logits: [N, vocab_size] float32; token_ids: [N]
        int64."""
        values = log_probabilities(logits) if normalized else torch.from_numpy(logits)
        chosen = values.gather(1, torch.from_numpy(token_ids)[:, None])
        ranks = (values > chosen).sum(dim=1) + 1
        found = chosen[:, 0].numpy()
        is_sound = np.isfinite(found) & np.isfinite(logits.max(axis=1))
        return Ranking(is_sound, token_ids, found, ranks.numpy(), self._best_of(values.numpy(), num_top))

    def _best_of(self, log_probs: np.ndarray, num_top: int) -> Best:
        """Best tokens of each row without NaN or plus infinity, the lowest first among equal ones, independent of other
        rows' requests."""
        if not num_top:
            return Best(np.empty((len(log_probs), 0), np.int64), np.empty((len(log_probs), 0), np.float32))
        sound = np.where(np.isfinite(log_probs.max(axis=1, keepdims=True)), log_probs, 0)
        tokens = PlainKernels._best(self, sound, num_top)
        return Best(tokens, np.take_along_axis(log_probs, tokens, axis=1))

    def _best(self, scores: np.ndarray, num_best: int) -> np.ndarray:
        """The `num_best` tokens with each row's highest scores, best first, the lowest first among equal ones. scores:
        [N, vocab_size] float32, sound rows. Returns [N, min(num_best, vocab_size)] int64."""
        num_rows, vocab_size = scores.shape
        width = min(num_best, vocab_size)
        lowest = np.partition(scores, vocab_size - width, axis=1)[:, vocab_size - width]
        best = np.empty((num_rows, width), np.int64)
        for row in range(num_rows):
            # More than `width` tokens may equal the lowest score, so they are sorted stably by id.
            token_ids = np.flatnonzero(scores[row] >= lowest[row])
            best[row] = token_ids[np.argsort(-scores[row, token_ids], kind="stable")[:width]]
        return best

    def _draw(self, scores: np.ndarray, index: np.ndarray, batch: HostBatch, used: int) -> np.ndarray:
        """Draw a token for each of the batch's rows `index`. Returns [len(index)] int64, -1 for rows without a finite
        sum."""
        uniforms = uniform(self._rows.seed[batch.rows[index]], batch.num_generated[index])
        step = max(1, SLICE_ELEMENTS // scores.shape[1])
        slices: Sequence[slice] = [slice(start, start + step) for start in range(0, len(index), step)]
        parts = [self._draw_slice(scores, index[some], uniforms[some], batch, used) for some in slices]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _draw_slice(
        self, scores: np.ndarray, index: np.ndarray, uniforms: np.ndarray, batch: HostBatch, used: int
    ) -> np.ndarray:
        rows, where = self._rows, batch.rows[index]
        with np.errstate(all="ignore"):  # NaN and infinite scores are looked for below
            weights = compute_weights(scores[index], rows.temperature[where])
            cumulative = cumulative_blocks(weights)
        bad = np.flatnonzero(~np.isfinite(cumulative[:, -1]))
        if bad.size:
            weights[bad] = 1
            cumulative[bad] = cumulative_blocks(weights[bad])
        if used & Feature.FILTERS:
            filtered = np.flatnonzero(rows.features[where] & Feature.FILTERS)
            some, at = weights[filtered], where[filtered]
            apply_filters(some, cumulative[filtered, -1], rows.top_k[at], rows.top_p[at], rows.min_p[at])
            weights[filtered], cumulative[filtered] = some, cumulative_blocks(some)
        token_ids = draw(weights, cumulative, uniforms)
        token_ids[bad] = -1
        return token_ids


def log_probabilities(logits: np.ndarray) -> torch.Tensor:
    """Log-softmax of logits, [N, vocab_size] float32, in a new tensor."""
    return torch.log_softmax(torch.from_numpy(logits), dim=-1, dtype=torch.float32)


def _best_of_row(scores: np.ndarray) -> np.ndarray:
    """Token of each row's highest score, the lowest of equal ones; -1 for rows with NaN, plus infinity or no finite
    score."""
    token_ids = scores.argmax(axis=1)
    # NumPy's argmax stops at a NaN, so checking the winner checks the row.
    token_ids[~np.isfinite(scores[np.arange(len(scores)), token_ids])] = -1
    return token_ids
