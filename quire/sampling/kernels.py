"""Interface of the sampler's kernels, one method a pass."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from quire.sampling.batch import Array, SampleBatch, TokenMasks
from quire.sampling.parameters import Asked, Listed
from quire.sampling.results import Best, Deferred, Ranking


class SamplingKernels(Protocol[Array]):
    """Kernels of one platform, bound to a worker's `SamplingRows`; Sampler calls them in order. Row i of every result
    depends bitwise on row i of the arguments only. No method waits for a device. scores: [R, vocab_size], edited in
    place."""

    def set_aside(self, logits: torch.Tensor, used: int, asked: Asked | None) -> tuple[Array, Array]:
        """(scores that later passes may overwrite, logits that `rank` reads). logits: [R, vocab_size], may be
        overwritten; float32 on the host. used: union of `Feature` over the batch. asked: rows that ask for
        log-probabilities."""
        ...

    def normalize(self, scores: Array, batch: SampleBatch[Array], beams: Asked) -> None:
        """Turn beams' scores into log-probabilities. Rules act on these, as in Transformers, so they do not raise other
        tokens."""
        ...

    def add_logit_bias(self, scores: Array, batch: SampleBatch[Array]) -> None:
        """Add each row's bias to its tokens."""
        ...

    def apply_penalties(self, scores: Array, batch: SampleBatch[Array], used: int) -> None:
        """Apply repetition, then presence and frequency penalties. used: see `set_aside`."""
        ...

    def ban_stop_tokens(self, scores: Array, batch: SampleBatch[Array]) -> None:
        """Ban the stop tokens of rows that generated fewer than `min_tokens` tokens."""
        ...

    def ban_sequences(self, scores: Array, batch: SampleBatch[Array]) -> None:
        """Ban the tokens that would complete a banned sequence. Only generated tokens can match a prefix."""
        ...

    def keep_allowed(self, scores: Array, batch: SampleBatch[Array]) -> None:
        """Make all other tokens impossible in rows with a list of allowed tokens."""
        ...

    def keep_masked(self, scores: Array, masks: TokenMasks) -> None:
        """Make all other tokens impossible in rows with a mask."""
        ...

    def choose(self, scores: Array, batch: SampleBatch[Array], used: int) -> Deferred[list[int]]:
        """[R], each row's token: the best in greedy rows (the lowest of equal ones), a drawn one in others; -1 for rows
        with NaN or plus infinity, or without any finite score. Writes it (0 for -1) to the token table. May overwrite
        the scores of rows that draw."""
        ...

    def chosen(self, token_ids: Deferred[list[int]]) -> Array:
        """[R]: result of `choose` where the kernels compute, with 0 for -1."""
        ...

    def keep_edited(self, scores: Array, asked: Asked) -> Array:
        """Scores before `choose`, for `process`."""
        ...

    def process(self, scores: Array, token_ids: Array, batch: SampleBatch[Array], asked: Asked) -> Array:
        """Logits, for `rank`, of the distribution that the asking rows were drawn from: divided by temperature, minus
        infinity for tokens without probability. scores: result of `keep_edited`, overwritten. token_ids: [R], which
        stay possible."""
        ...

    def rank(
        self, logits: Array, token_ids: Array, batch: SampleBatch[Array], asked: Asked, *, normalized: bool
    ) -> Deferred[Ranking]:
        """Log-probability and rank of the chosen token, and the best tokens, of the asking rows. logits: from
        `set_aside` or `process`. token_ids: [R]. normalized: False for logits in place of log-probabilities."""
        ...

    def compare_listed(
        self, logits: Array, token_ids: Array, listed: Listed, asked: Asked, *, normalized: bool
    ) -> Deferred[np.ndarray]:
        """[P] float32: difference of each listed token's logit to its row's chosen one, or the logit itself if not
        normalized. Arguments: see `rank`."""
        ...

    def rank_beams(self, scores: Array, batch: SampleBatch[Array], beams: Asked) -> Deferred[Best]:
        """Best tokens of each beam, the lowest first among equal scores: most that a beam asks for, or the
        whole vocabulary. Not valid for a beam without sound scores."""
        ...

    def rank_tokens(
        self, logits: torch.Tensor, token_ids: Array, num_top: int, *, normalized: bool
    ) -> Deferred[Ranking]:
        """Work of `Sampler.logprobs`: ranking of one given (prompt) token per row, and the `num_top` best. logits:
        contiguous rows."""
        ...
