"""Batched sampler: its passes' order, which the kernels implement."""

from __future__ import annotations

from typing import Generic

import torch

from quire.sampling.batch import Array, SampleBatch, TokenMasks
from quire.sampling.kernels import SamplingKernels
from quire.sampling.parameters import EDITS, PENALTIES, Feature, SamplingRows
from quire.sampling.results import ListedLogprobs, Logprobs, Samples


class Sampler(Generic[Array]):
    """Chooses one token per row of a step, in the worker. Stateless: rows and batch hold all state."""

    def __init__(
        self, rows: SamplingRows, kernels: SamplingKernels[Array], logprobs_mode: str = "raw_logprobs"
    ) -> None:
        """kernels: bound to `rows`. logprobs_mode: source of log-probabilities or logits: model ("raw_logprobs",
        "raw_logits") or the distribution drawn from ("processed_logprobs", "processed_logits")."""
        self._rows = rows
        self._reports_processed = logprobs_mode.startswith("processed")
        self._normalized = logprobs_mode.endswith("logprobs")
        self._kernels: SamplingKernels[Array] = kernels

    def sample(self, logits: torch.Tensor, batch: SampleBatch[Array], masks: TokenMasks | None = None) -> Samples:
        """Sample a token for each row, and write it after the row's last one in the token table. logits: [R,
        vocab_size], where the kernels compute, contiguous rows; may be overwritten. float32 on the host; bfloat16,
        float16 or float32 on a device. masks: allowed tokens of some rows. A row with NaN or plus infinity, or without
        any finite logit, is reported as nonfinite."""
        rows, kernels, where = self._rows, self._kernels, batch.rows_host
        used = rows.used(where) | (0 if masks is None else Feature.TOKEN_MASK)
        logprobs = rows.asked(where, Feature.LOGPROBS, rows.num_logprobs) if used & Feature.LOGPROBS else None
        beams = rows.asked(where, Feature.CANDIDATES, rows.num_candidates) if used & Feature.CANDIDATES else None
        # 1. The model's own log-probabilities: their logits are set aside before anything changes.
        scores, reported = kernels.set_aside(logits, used, None if self._reports_processed else logprobs)
        # 2. The operator's processors, bias, penalties, bans, allowed tokens, masks; then the processors that keep the
        # best token. A beam's log-probabilities change instead of its logits.
        if beams is not None:
            kernels.normalize(scores, batch, beams)
        failed: dict[int, str] = {}
        if used & Feature.PROCESSED:
            failed = rows.processors.apply(scores, batch, None)
        if used & EDITS:
            self._edit(scores, batch, used)
        if masks is not None:
            kernels.keep_masked(scores, masks)
        if used & Feature.PROCESSED:
            failed |= rows.processors.apply(scores, batch, rows.temperature)
        # 3. Greedy rows take the best score, the others draw.
        processed = logprobs if self._reports_processed else None
        if processed is not None:
            reported = kernels.keep_edited(scores, processed)
        chosen = kernels.choose(scores, batch, used)
        # 4. The beams' candidates, and log-probabilities of the chosen tokens.
        candidates = None if beams is None else kernels.rank_beams(scores, batch, beams)
        ranking, more, normalized = None, None, self._normalized
        if logprobs is not None:
            token_ids = kernels.chosen(chosen)
            if processed is not None:
                reported = kernels.process(reported, token_ids, batch, processed)
            ranking = kernels.rank(reported, token_ids, batch, logprobs, normalized=normalized)
            if (listed := rows.listed(where, logprobs)) is not None:
                values = kernels.compare_listed(reported, token_ids, listed, logprobs, normalized=normalized)
                more = ListedLogprobs(values, listed, normalized)
        return Samples(chosen, ranking, candidates, logprobs, beams, more, failed)

    def logprobs(self, logits: torch.Tensor, token_ids: Array, num_top: int) -> Logprobs:
        """Log-probability (or logit) and rank of one given (prompt) token per row, and the `num_top` (at most
        MAX_LOGPROBS) best tokens, without rules, temperature and filters. logits: [N, vocab_size], as in `sample`.
        token_ids: [N] int64, int32 on a device, where the kernels compute."""
        return Logprobs(self._kernels.rank_tokens(logits, token_ids, num_top, normalized=self._normalized), num_top)

    def _edit(self, scores: Array, batch: SampleBatch[Array], used: int) -> None:
        """Change the scores in place, in this order, by the batch's features."""
        kernels = self._kernels
        if used & Feature.LOGIT_BIAS:
            kernels.add_logit_bias(scores, batch)
        if used & PENALTIES:
            kernels.apply_penalties(scores, batch, used)
        if used & Feature.MIN_TOKENS:
            kernels.ban_stop_tokens(scores, batch)
        if used & Feature.BAD_WORDS:
            kernels.ban_sequences(scores, batch)
        if used & Feature.ALLOWED_TOKENS:
            kernels.keep_allowed(scores, batch)
