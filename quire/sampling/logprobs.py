"""Log-probabilities of the model itself: of raw logits, before temperature, penalties and filters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.sampling.errors import NonFiniteLogitsError
from quire.sampling_params import MAX_LOGPROBS
from quire.step import TokenLogprobs


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """logits: [N, vocab_size] float32. Returns a new tensor of that shape."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def token_logprobs(log_probs: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """The log-probability and rank of one token per row, and the `num_top[i]` best tokens of row i.

    log_probs: [N, vocab_size] of `log_probabilities`; token_ids: [N] int64. Raises NonFiniteLogitsError with the
    indices of rows that hold NaN.
    """
    chosen = log_probs.gather(1, token_ids[:, None])
    finite = torch.isfinite(chosen[:, 0])
    if not finite.all():
        raise NonFiniteLogitsError(torch.nonzero(~finite)[:, 0].tolist())
    ranks = ((log_probs > chosen).sum(dim=1) + 1).tolist()
    # One width whatever is asked for: which of several equal tokens comes first must not depend on the batch.
    width = min(MAX_LOGPROBS, log_probs.shape[1]) if any(num_top) else 0
    top_values, top_tokens = (part.tolist() for part in log_probs.topk(width, dim=1))
    columns = zip(token_ids.tolist(), chosen[:, 0].tolist(), top_tokens, top_values, num_top, ranks, strict=True)
    return [
        TokenLogprobs([token, *tokens[:count]], [value, *values[:count]], rank)
        for token, value, tokens, values, count, rank in columns
    ]
