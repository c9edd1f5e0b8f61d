"""Triton kernels of a device: passes are enqueued without waiting. Greedy rows take two launches and read the logits
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from quire.kernels.triton import filters, logprobs, penalties, rules, sampling
from quire.kernels.triton.sampling_shapes import Histories, SamplingShapes, allocate_buffers
from quire.sampling.batch import SampleBatch, TokenMasks
from quire.sampling.lists import ALLOWED
from quire.sampling.parameters import EDITS, NUM_WORDS, Asked, Feature, Listed, SamplingRows
from quire.sampling.results import LOWEST_SCORE, Best, Deferred, Ranking
from quire.sampling_params import MAX_LOGPROBS

DeviceBatch = SampleBatch[torch.Tensor]
Pinned = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Allocator of uninitialised host memory whose copies to the device run beside the host's work."""


class TritonKernels:
    """SamplingKernels over CUDA tensors. A batch's rows, lengths and num_prompt_tokens are int32."""

    def __init__(
        self,
        rows: SamplingRows,
        words: torch.Tensor,
        pinned: Pinned,
        shapes: SamplingShapes | None = None,
        rank_lanes: int = logprobs.LANES,
    ) -> None:
        """words: [num_rows, NUM_WORDS] int32, on the device; the caller writes `SamplingRows.words` of each row that it
        sets. shapes, rank_lanes: division of a row in the kernels, powers of two."""
        assert words.shape == (len(rows.features), NUM_WORDS), f"{words.shape} words for {len(rows.features)} rows"
        self._rows = rows
        self._words = words
        self._pinned = pinned
        self._shapes = SamplingShapes() if shapes is None else shapes
        self._rank_lanes = rank_lanes
        self._lists: tuple[np.ndarray | None, torch.Tensor] = (None, words)
        self._counts = torch.zeros((0, 0), dtype=torch.int32, device=words.device)

    def set_aside(self, logits: torch.Tensor, used: int, asked: Asked | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores, logits). Where edits change scores, these are a float32 copy if log-probabilities need the logits or
        these have 16 bits."""
        changes = used & (EDITS | Feature.CANDIDATES)
        if changes and (logits.dtype != torch.float32 or asked is not None):
            return logits.to(torch.float32, copy=True), logits
        return logits, logits

    def normalize(self, scores: torch.Tensor, batch: DeviceBatch, beams: Asked) -> None:
        logprobs.normalize(scores, batch.rows, self._words, Feature.CANDIDATES, self._rank_lanes)

    def add_logit_bias(self, scores: torch.Tensor, batch: DeviceBatch) -> None:
        rules.add_logit_bias(scores, batch.rows, self._list_words())

    def apply_penalties(self, scores: torch.Tensor, batch: DeviceBatch, used: int) -> None:
        if self._counts.shape[0] < len(scores):
            # The table of counts is all zeros between calls.
            self._counts = torch.zeros(tuple(scores.shape), dtype=torch.int32, device=self._words.device)
        penalties.apply_penalties(scores, batch.rows, self._words, _histories(batch), self._counts)

    def ban_stop_tokens(self, scores: torch.Tensor, batch: DeviceBatch) -> None:
        rules.ban_stop_tokens(scores, batch.rows, self._words, _histories(batch), self._list_words())

    def ban_sequences(self, scores: torch.Tensor, batch: DeviceBatch) -> None:
        rules.ban_sequences(scores, batch.rows, _histories(batch), self._list_words())

    def keep_allowed(self, scores: torch.Tensor, batch: DeviceBatch) -> None:
        _, sizes = self._rows.lists.spans(ALLOWED, batch.rows_host)
        rules.keep_allowed(scores, batch.rows, self._list_words(), int(sizes.max()))

    def keep_masked(self, scores: torch.Tensor, masks: TokenMasks) -> None:
        indices, words = (self._to_device(column) for column in (masks.indices, masks.words.view(np.int32)))
        rules.keep_masked(scores, indices, words)

    def choose(self, scores: torch.Tensor, batch: DeviceBatch, used: int) -> Deferred[list[int]]:
        rows, words, shapes, histories = batch.rows, self._words, self._shapes, _histories(batch)
        vocab_size = scores.shape[1]
        filtered = used & Feature.FILTERS
        features = self._rows.features[batch.rows_host]
        plain = features[(features & Feature.FILTERS) == 0]
        draws = bool((plain & Feature.RANDOM).any())
        buffers = allocate_buffers(len(scores), vocab_size, shapes, scores.device, filtered=bool(filtered))
        sampling.scan(scores, rows, words, buffers, shapes, random=draws, filtered=filtered)
        if len(plain):
            sampling.pick(scores, rows, words, histories, buffers, shapes, random=draws, filtered=filtered)
        if filtered:
            filters.cutoff(rows, words, vocab_size, buffers, shapes, filtered)
            filters.collect(scores, rows, words, buffers, shapes, filtered)
            filters.pick_filtered(scores, rows, words, histories, buffers, shapes, filtered)
        return Deferred((buffers.chosen,), _read_choice)

    def chosen(self, token_ids: Deferred[list[int]]) -> torch.Tensor:
        return token_ids.tensors[0][:, 0]

    def keep_edited(self, scores: torch.Tensor, asked: Asked) -> torch.Tensor:
        """Scores themselves, which `choose` does not change."""
        return scores

    def process(self, scores: torch.Tensor, token_ids: torch.Tensor, batch: DeviceBatch, asked: Asked) -> torch.Tensor:
        """Processed logits [R, vocab_size] float32, undefined in rows that do not ask for log-probabilities."""
        processed = torch.empty_like(scores, dtype=torch.float32) if scores.dtype != torch.float32 else scores
        features = (Feature.LOGPROBS, Feature.FILTERS)
        lanes = self._shapes.lanes
        filters.process(scores, token_ids, processed, batch.rows, self._words, features, LOWEST_SCORE, lanes)
        return processed

    def rank(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        batch: DeviceBatch,
        asked: Asked,
        *,
        normalized: bool,
    ) -> Deferred[Ranking]:
        # One width for what requests usually ask for keeps the number of shapes small; 0: none asks for alternatives.
        num_top = max(MAX_LOGPROBS, *asked.counts) if any(asked.counts) else 0
        result = self._rank(logits, token_ids, num_top, batch.rows, Feature.LOGPROBS, normalized=normalized)
        return Deferred((result,), lambda hosts: _read_ranking(next(hosts).numpy()[asked.indices]))

    def compare_listed(
        self, logits: torch.Tensor, token_ids: torch.Tensor, listed: Listed, asked: Asked, *, normalized: bool
    ) -> Deferred[np.ndarray]:
        vocab_size = logits.shape[1]
        rows, tokens = self._to_device(asked.indices[listed.where]), self._to_device(listed.token_ids)
        begins = rows.to(torch.int64) * vocab_size
        # Not logits[rows, tokens]: such indexing may wait for the device.
        values = [
            torch.take(logits, begins + each).to(torch.float32) for each in (tokens, token_ids.index_select(0, rows))
        ]
        found = values[0] - values[1] if normalized else values[0]
        return Deferred((found,), lambda hosts: next(hosts).numpy())

    def rank_beams(self, scores: torch.Tensor, batch: DeviceBatch, beams: Asked) -> Deferred[Best]:
        result = self._rank(scores, None, max(beams.counts), batch.rows, Feature.CANDIDATES, normalized=False)
        return Deferred((result,), lambda hosts: _read_ranking(next(hosts).numpy()[beams.indices]).best)

    def rank_tokens(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, *, normalized: bool
    ) -> Deferred[Ranking]:
        # All rows are ranked, without looking at parameters.
        result = self._rank(logits, token_ids, num_top, token_ids, 0, normalized=normalized)
        return Deferred((result,), lambda hosts: _read_ranking(next(hosts).numpy()))

    def _rank(
        self,
        scores: torch.Tensor,
        targets: torch.Tensor | None,
        num_best: int,
        rows: torch.Tensor,
        feature: int,
        *,
        normalized: bool,
    ) -> torch.Tensor:
        """[R, words] int32 of `quire.kernels.triton.logprobs.rank`."""
        count, vocab_size = scores.shape
        width = min(num_best, vocab_size)
        # Rows without the feature stay zero, so that uninitialised memory is not copied to the host.
        shape, make = (count, logprobs.result_words(width)), torch.zeros if feature else torch.empty
        result = make(shape, dtype=torch.int32, device=scores.device)
        logprobs.rank(
            scores,
            targets,
            result,
            rows,
            self._words,
            feature,
            self._rank_lanes,
            normalized=normalized,
        )
        return result

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        host = self._pinned(values.shape, torch.int32)
        host.numpy()[...] = values
        return host.to(self._words.device, non_blocking=True)

    def _list_words(self) -> torch.Tensor:
        words = self._rows.lists.words()
        source, tensor = self._lists
        if source is not words:
            tensor = self._to_device(words)
            self._lists = words, tensor
        return tensor


def _histories(batch: DeviceBatch) -> Histories:
    return Histories(batch.lengths, batch.num_prompt_tokens, batch.token_table)


def _read_choice(hosts: Iterator[torch.Tensor]) -> list[int]:
    return [token_id if is_sound else -1 for token_id, is_sound in next(hosts).tolist()]


def _read_ranking(words: np.ndarray) -> Ranking:
    """Ranking from [N, words] int32 of `quire.kernels.triton.logprobs.rank`: 1 if the row is sound, the target's rank;
    pairs of tokens and values, the target's first."""
    pairs = words[:, logprobs.FIRST_PAIR :]
    tokens, values = pairs[:, ::2], np.ascontiguousarray(pairs[:, 1::2]).view(np.float32)
    best = Best(tokens[:, 1:], values[:, 1:])
    return Ranking(words[:, 0] != 0, tokens[:, 0], values[:, 0], words[:, 1], best)
