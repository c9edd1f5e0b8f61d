"""What a platform does for the sampler: one method for each of its passes."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from quire.sampling.batch import Array, SampleBatch, TokenMasks
from quire.sampling.parameters import Asked, Listed
from quire.sampling.results import Best, Deferred, Ranking


class SamplingKernels(Protocol[Array]):
    """Bound to the `SamplingRows` of one worker. Row i of every result depends on row i of the arguments alone, bit by
    bit. Nothing waits for a device. scores: [R, vocab_size], edited in place.
    """

    def set_aside(self, logits: torch.Tensor, used: int, asked: Asked | None) -> tuple[Array, Array]:
        """The scores that later passes may overwrite, and the logits that `rank` reads.

        logits: [R, vocab_size], which may be overwritten; on the host in float32. used: the union of `Feature` over the
        batch. asked: the rows that ask for log-probabilities.
        """
        ...

    def normalize(self, scores: Array, batch: SampleBatch[Array], beams: Asked) -> None:
        """Turn the scores of beams into log-probabilities. The rules act on these, as in Transformers, so that they do
        not raise what they leave alone."""
        ...

    def add_logit_bias(self, scores: Array, batch: SampleBatch[Array]) -> None:
        """Add each row's bias to its tokens."""
        ...

    def apply_penalties(self, scores: Array, batch: SampleBatch[Array], used: int) -> None:
        """Apply repetition penalties, then presence and frequency penalties."""
        ...

    def ban_stop_tokens(self, scores: Array, batch: SampleBatch[Array]) -> None:
        """Ban the stop tokens of rows that generated fewer than `min_tokens` tokens."""
        ...

    def ban_sequences(self, scores: Array, batch: SampleBatch[Array]) -> None:
        """Ban the tokens that would complete a banned sequence. Only generated tokens can match a prefix."""
        ...

    def keep_allowed(self, scores: Array, batch: SampleBatch[Array]) -> None:
        """In rows that have a list of allowed tokens, make every other token impossible."""
        ...

    def keep_masked(self, scores: Array, masks: TokenMasks) -> None:
        """In rows that have a mask, make every token impossible that it does not allow."""
        ...

    def choose(self, scores: Array, batch: SampleBatch[Array], used: int) -> Deferred[list[int]]:
        """[R], a token for each row: the best one of greedy rows (of several equal ones the lowest), a drawn one of
        others; -1 for rows with NaN or plus infinity, or without any finite score.

        Writes it (0 for -1) to the token table. May overwrite the scores of rows that draw.
        """
        ...

    def chosen(self, token_ids: Deferred[list[int]]) -> Array:
        """[R]: what `choose` returned, where the kernels compute, with 0 for -1."""
        ...

    def keep_edited(self, scores: Array, asked: Asked) -> Array:
        """The scores that `process` reads, as they are before `choose`."""
        ...

    def process(self, scores: Array, token_ids: Array, batch: SampleBatch[Array], asked: Asked) -> Array:
        """The logits of the distribution that the rows that ask were drawn from: by temperature, and minus infinity for
        tokens that filters and rules leave no probability. scores: of `keep_edited`, overwritten. token_ids: [R], which
        stay possible. Returns what `rank` takes."""
        ...

    def rank(
        self, logits: Array, token_ids: Array, batch: SampleBatch[Array], asked: Asked, *, normalized: bool
    ) -> Deferred[Ranking]:
        """Log-probability and rank of the chosen token, and the best tokens, of the rows that ask. logits: of
        `set_aside` or of `process`. token_ids: [R]. normalized: False for logits in place of log-probabilities."""
        ...

    def compare_listed(
        self, logits: Array, token_ids: Array, listed: Listed, asked: Asked, *, normalized: bool
    ) -> Deferred[np.ndarray]:
        """[P] float32: by how much the logit of each listed token is above that of its row's chosen one, or where it is
        not to be normalized the logit itself. The arguments are those of `rank`."""
        ...

    def rank_beams(self, scores: Array, batch: SampleBatch[Array], beams: Asked) -> Deferred[Best]:
        """The tokens of the best scores of each beam, of several equal ones the lowest first: as many as the most that
        a beam asks for, or the whole vocabulary. Of a beam without sound scores nothing is valid."""
        ...

    def rank_tokens(
        self, logits: torch.Tensor, token_ids: Array, num_top: int, *, normalized: bool
    ) -> Deferred[Ranking]:
        """Log-probability and rank of one given token for each row, and the `num_top` (at most MAX_LOGPROBS) best ones.

        logits: [N, vocab_size], the elements of a row side by side. token_ids: [N] int64, int32 on a device.
        normalized: as for `rank`.
        """
        ...
