"""The batched sampler of a device: the recipe of `quire.sampling.sampler` as kernels on one stream.

Nothing here waits for the device or asks it for a value. Which kernels a step needs is known on the host, from the
features of its rows; which rows a kernel concerns it finds out itself. What a batch does not ask for costs nothing:
greedy rows take two launches and read the logits once.

The memory that a batch takes: almost nothing without filters; 12 KiB for each row and 8,192 tokens of the vocabulary
with them (58 MB for 256 rows of 151,936); float32 scores, 4 bytes per token of the vocabulary and row, where rules or
penalties change logits of 16 bits, or logits that log-probabilities are wanted of. Penalties keep as much for good,
from their first use to `release_workspaces`.
"""

from __future__ import annotations

import torch

from quire.kernels.triton import filters, logprobs, penalties, rules, sampling
from quire.kernels.triton.sampling_shapes import SamplingShapes, allocate_buffers
from quire.sampling.device.batch import DeviceSampleBatch
from quire.sampling.device.parameters import DeviceSamplingRows
from quire.sampling.device.samples import DeviceLogprobs, DeviceSamples
from quire.sampling.parameters import EDITS, Feature
from quire.sampling_params import MAX_LOGPROBS

PENALTIES = Feature.REPETITION_PENALTY | Feature.OUTPUT_PENALTIES
__all__ = ["DeviceLogprobs", "DeviceSampler", "DeviceSamples"]


class DeviceSampler:
    """Chooses one token per row. Calls are enqueued on the current stream, one after the other."""

    def __init__(
        self, rows: DeviceSamplingRows, shapes: SamplingShapes | None = None, rank_lanes: int = logprobs.LANES
    ) -> None:
        """shapes, rank_lanes: how kernels divide a row; a power of two each."""
        self._rows = rows
        self._shapes = SamplingShapes() if shapes is None else shapes
        self._rank_lanes = rank_lanes
        self._counts = torch.zeros((0, 0), dtype=torch.int32, device=rows.words.device)

    def sample(self, logits: torch.Tensor, batch: DeviceSampleBatch) -> DeviceSamples:
        """logits: [R, vocab_size], bfloat16, float16 or float32, on the device, the elements of a row side by side; may
        be overwritten. Also writes each row's token behind its last one in the token table."""
        used = self._rows.used(batch.rows_host)
        # 1. Log-probabilities are the model's own: where they are wanted, the scores that change are a copy.
        scores = logits
        changes = used & (EDITS | Feature.CANDIDATES)
        if changes and (logits.dtype != torch.float32 or used & Feature.LOGPROBS):
            scores = logits.to(torch.float32, copy=True)
        # 2. Bias, penalties, bans, allowed tokens. Those of a beam change its log-probabilities.
        words = self._rows.words
        if used & Feature.CANDIDATES:
            logprobs.normalize(scores, batch.rows, words, Feature.CANDIDATES, self._rank_lanes)
        if used & EDITS:
            self._edit(scores, batch, used)
        # 3. Greedy rows take the best score, the others draw.
        chosen = self._choose(scores, batch, used)
        # 4. What beams can go on with, and log-probabilities of what was chosen.
        num_candidates = self._asked(batch, used, Feature.CANDIDATES)
        candidates = None
        if num_candidates:
            candidates = self._rank(scores, None, max(num_candidates.values()), batch, Feature.CANDIDATES)
        num_logprobs = self._asked(batch, used, Feature.LOGPROBS)
        ranked = None
        if num_logprobs:
            # One width whatever the requests ask for keeps the number of shapes small; 0 when none asks for
            # alternatives.
            num_top = MAX_LOGPROBS if any(num_logprobs.values()) else 0
            ranked = self._rank(logits, chosen[:, 0], num_top, batch, Feature.LOGPROBS)
        return DeviceSamples(chosen, ranked, candidates, num_logprobs, num_candidates)

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> DeviceLogprobs:
        """Log-probability and rank of one token per row, and the `num_top` (at most MAX_LOGPROBS) best tokens.

        logits: [N, vocab_size], on the device, the elements of a row side by side; token_ids: [N] int32, there too.
        """
        count, vocab_size = logits.shape
        width = min(num_top, vocab_size)
        shape = (count, logprobs.result_words(width))
        result = torch.empty(shape, dtype=torch.int32, device=logits.device)
        # Every row is wanted, whatever it is: no parameters are looked at.
        logprobs.rank(logits, token_ids, width, result, token_ids, self._rows.words, lanes=self._rank_lanes)
        return DeviceLogprobs(result, [num_top] * count)

    def release_workspaces(self) -> None:
        """Free the memory that is kept between calls; the next call that needs it allocates it again."""
        self._counts = torch.zeros((0, 0), dtype=torch.int32, device=self._rows.words.device)

    def _asked(self, batch: DeviceSampleBatch, used: int, feature: int) -> dict[int, int]:
        """Batch index -> how many entries a row asks for, of the rows that have `feature`."""
        if not used & feature:
            return {}
        rows = self._rows
        numbers = rows.num_logprobs if feature == Feature.LOGPROBS else rows.num_candidates
        where = ((rows.features[batch.rows_host] & feature) != 0).nonzero()[0]
        return dict(zip(where.tolist(), numbers[batch.rows_host[where]].tolist(), strict=True))

    def _edit(self, scores: torch.Tensor, batch: DeviceSampleBatch, used: int) -> None:
        """Change the scores in place, in this order, by the features that the batch uses."""
        words, lists, histories = self._rows.words, self._rows.lists, batch.histories
        if used & Feature.LOGIT_BIAS:
            rules.add_logit_bias(scores, batch.rows, lists.tensor())
        if used & PENALTIES:
            counts = self._zero_counts(*scores.shape)
            penalties.apply_penalties(scores, batch.rows, words, histories, counts)
        if used & Feature.MIN_TOKENS:
            rules.ban_stop_tokens(scores, batch.rows, words, histories, lists.tensor())
        if used & Feature.BAD_WORDS:
            rules.ban_sequences(scores, batch.rows, histories, lists.tensor())
        if used & Feature.ALLOWED_TOKENS:
            rules.keep_allowed(scores, batch.rows, lists.tensor())

    def _choose(self, scores: torch.Tensor, batch: DeviceSampleBatch, used: int) -> torch.Tensor:
        """[R, 2] int32: token, and whether the row is sound."""
        rows, words, shapes = batch.rows, self._rows.words, self._shapes
        vocab_size = scores.shape[1]
        filtered = used & Feature.FILTERS
        features = self._rows.features[batch.rows_host]
        plain = features[(features & Feature.FILTERS) == 0]
        draws = bool((plain & Feature.RANDOM).any())
        buffers = allocate_buffers(len(scores), vocab_size, shapes, scores.device, filtered=bool(filtered))
        sampling.scan(scores, rows, words, buffers, shapes, random=draws, filtered=filtered)
        histories = batch.histories
        if len(plain):
            sampling.pick(scores, rows, words, histories, buffers, shapes, random=draws, filtered=filtered)
        if filtered:
            filters.cutoff(rows, words, vocab_size, buffers, shapes, filtered)
            filters.collect(scores, rows, words, buffers, shapes, filtered)
            filters.pick_filtered(scores, rows, words, histories, buffers, shapes, filtered)
        return buffers.chosen

    def _rank(
        self,
        scores: torch.Tensor,
        targets: torch.Tensor | None,
        num_best: int,
        batch: DeviceSampleBatch,
        feature: int,
    ) -> torch.Tensor:
        count, vocab_size = scores.shape
        width = min(num_best, vocab_size)
        # Rows without the feature stay zero, so that uninitialised memory is not copied to the host.
        shape = (count, logprobs.result_words(width))
        result = torch.zeros(shape, dtype=torch.int32, device=scores.device)
        logprobs.rank(scores, targets, width, result, batch.rows, self._rows.words, feature, self._rank_lanes)
        return result

    def _zero_counts(self, num_rows: int, vocab_size: int) -> torch.Tensor:
        """The table of counts, which is all zeros between calls."""
        if self._counts.shape[0] < num_rows:
            self._counts = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=self._rows.words.device)
        return self._counts
