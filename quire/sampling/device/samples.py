"""Results that the device sampler has enqueued: their tensors, and how the host reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.triton.logprobs import FIRST_PAIR
from quire.sampling.candidates import LOWEST_SCORE
from quire.sampling.errors import NonFiniteLogitsError
from quire.sampling.sampler import SampledTokens
from quire.step import Candidates, TokenLogprobs


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Log-probabilities of N tokens. ranked: [N, words] int32, of `quire.kernels.triton.logprobs.rank`."""

    ranked: torch.Tensor
    num_top: Sequence[int]

    def tensors(self) -> list[torch.Tensor]:
        """What must be copied to the host."""
        return [self.ranked]

    def assemble(self, hosts: Sequence[torch.Tensor]) -> list[TokenLogprobs]:
        """hosts: `tensors` on the host. Raises NonFiniteLogitsError with the indices of rows that hold NaN or plus
        infinity, or whose token is impossible."""
        (ranked,) = hosts
        words = ranked.numpy()
        bad = np.flatnonzero(words[:, 0] == 0)
        if bad.size:
            raise NonFiniteLogitsError(bad.tolist())
        return read_logprobs(words, self.num_top)


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    """The tokens of R rows. chosen: [R, 2] int32, each row's token and whether its scores are sound.

    ranked: [R, words] int32, of `rank` over the model's logits; candidates: the same over the scores of beams; each
    None where no row asks. num_logprobs, num_candidates: by batch index, how many a row asks for.
    """

    chosen: torch.Tensor
    ranked: torch.Tensor | None
    candidates: torch.Tensor | None
    num_logprobs: dict[int, int]
    num_candidates: dict[int, int]

    @property
    def token_ids(self) -> torch.Tensor:
        """[R] int32, on the device."""
        return self.chosen[:, 0]

    def tensors(self) -> list[torch.Tensor]:
        """What must be copied to the host."""
        return [tensor for tensor in (self.chosen, self.ranked, self.candidates) if tensor is not None]

    def assemble(self, hosts: Sequence[torch.Tensor]) -> SampledTokens:
        """hosts: `tensors` on the host. A row with NaN or plus infinity, or without any finite score, is nonfinite."""
        remaining = iter(hosts)
        chosen = next(remaining).numpy()
        ranked = None if self.ranked is None else next(remaining).numpy()
        candidates = None if self.candidates is None else next(remaining).numpy()
        is_bad = chosen[:, 1] == 0
        asked = list(self.num_logprobs)
        if ranked is not None:
            is_bad[asked] |= ranked[asked, 0] == 0
        logprobs: dict[int, TokenLogprobs] = {}
        if ranked is not None:
            entries = read_logprobs(ranked[asked], list(self.num_logprobs.values()))
            logprobs = {index: entry for index, entry in zip(asked, entries, strict=True) if not is_bad[index]}
        found: dict[int, Candidates] = {}
        if candidates is not None:
            asked_by = [(index, most) for index, most in self.num_candidates.items() if not is_bad[index]]
            found = {index: _candidates(candidates[index], most) for index, most in asked_by}
        return SampledTokens(chosen[:, 0].astype(np.int64), logprobs, found, tuple(np.flatnonzero(is_bad).tolist()))


def read_logprobs(words: np.ndarray, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """words: [N, words] int32 of `rank`; num_top: for each row, how many of the best tokens it asks for."""
    tokens, values = _pairs(words)
    columns = zip(tokens.tolist(), values.tolist(), num_top, words[:, 1].tolist(), strict=True)
    return [TokenLogprobs(ids[: 1 + most], scores[: 1 + most], rank) for ids, scores, most, rank in columns]


def _candidates(words: np.ndarray, most: int) -> Candidates:
    """words: [words] int32 of `rank` over scores. A row has one candidate even if everything is forbidden."""
    tokens, values = _pairs(words[None])
    tokens, values = tokens[0, 1:], values[0, 1:]
    count = min(most, max(1, int((values > LOWEST_SCORE).sum())))
    return Candidates(tokens[:count].tolist(), values[:count].tolist())


def _pairs(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens ([N, 1 + best] int32) and their values (float32) in rows of `rank`: the target's, then the best ones."""
    pairs = words[:, FIRST_PAIR:]
    return pairs[:, ::2], np.ascontiguousarray(pairs[:, 1::2]).view(np.float32)
