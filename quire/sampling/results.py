"""Results of kernels, on the device until read, and a step's report."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from quire.sampling.errors import NonFiniteLogitsError
from quire.sampling.parameters import Asked, Listed
from quire.sampling.rules import BANNED_SCORE
from quire.step import Candidates, TokenLogprobs

LOWEST_SCORE = float(BANNED_SCORE) / 2
"""Bound of banned tokens' scores."""

Result = TypeVar("Result")


class Best(NamedTuple):
    """Best tokens of N rows, best first: token_ids and scores, [N, K]."""

    token_ids: np.ndarray
    scores: np.ndarray


class Ranking(NamedTuple):
    """Best tokens of N rows, and one chosen token of each: token_ids, logprobs, ranks (1 is the best), [N] each.
    is_sound: [N] bool; False for a row with NaN or plus infinity, or an impossible token, whose other values are not
    valid. best: best tokens with their log-probabilities, at least as many as any row wants."""

    is_sound: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    best: Best


class Deferred(NamedTuple, Generic[Result]):
    """Result of a kernel, read when the step is collected. tensors: to copy to the host; none if computed there. read:
    from an iterator over their copies to the result."""

    tensors: Sequence[torch.Tensor]
    read: Callable[[Iterator[torch.Tensor]], Result]


def ready(result: Result) -> Deferred[Result]:
    return Deferred((), lambda _: result)


class SampledTokens(NamedTuple):
    """token_ids: [R], aligned with the batch. logprobs, candidates: by batch index, where requested. nonfinite: indices
    of rows with NaN or infinite logits; they have token 0 and nothing else."""

    token_ids: Sequence[int]
    logprobs: dict[int, TokenLogprobs]
    candidates: dict[int, Candidates]
    nonfinite: Sequence[int] = ()


class ListedLogprobs(NamedTuple):
    """Log-probabilities of tokens that requests name. values: difference of each listed token's logit to the chosen
    token's, whose log-probability is in the ranking; the logits themselves if not normalized."""

    values: Deferred[np.ndarray]
    listed: Listed
    normalized: bool

    def add_to(self, entries: Sequence[TokenLogprobs], hosts: Iterator[torch.Tensor]) -> None:
        """Add the listed tokens to `entries`, results of the rows that ask for log-probabilities."""
        found = self.values.read(hosts)
        if self.normalized:
            chosen = np.array([entry.logprobs[0] for entry in entries], np.float32)
            # No log-probability is above 0, where rounding may bring the sum.
            found = np.minimum(found + chosen[self.listed.where], 0)
        values = iter(found.tolist())
        token_ids = iter(self.listed.token_ids.tolist())
        for entry, count in zip(entries, self.listed.counts, strict=True):
            entry.token_ids += itertools.islice(token_ids, count)
            entry.logprobs += itertools.islice(values, count)
            entry.num_listed = count


class Samples(NamedTuple):
    """Results of sampling R rows. token_ids: [R], -1 for rows with NaN or plus infinity, or without any finite score.
    ranking, candidates: for rows that ask for log-probabilities, and beams. failed: row -> reason why its request must
    end."""

    token_ids: Deferred[list[int]]
    ranking: Deferred[Ranking] | None = None
    candidates: Deferred[Best] | None = None
    logprobs_asked: Asked | None = None
    candidates_asked: Asked | None = None
    listed: ListedLogprobs | None = None
    failed: Mapping[int, str] = MappingProxyType({})

    def tensors(self) -> list[torch.Tensor]:
        parts = (self.token_ids, self.ranking, None if self.listed is None else self.listed.values, self.candidates)
        return [tensor for part in parts if part is not None for tensor in part.tensors]

    def assemble(self, hosts: Iterable[torch.Tensor] = ()) -> SampledTokens:
        """Result for the engine, once copied. hosts: copies of `tensors` on the host; of an iterator no more are
        taken."""
        remaining = iter(hosts)
        token_ids = self.token_ids.read(remaining)
        nonfinite: Sequence[int] = ()
        if -1 in token_ids:
            nonfinite = [row for row, token_id in enumerate(token_ids) if token_id < 0]
            token_ids = [max(token_id, 0) for token_id in token_ids]
        logprobs: dict[int, TokenLogprobs] = {}
        candidates: dict[int, Candidates] = {}
        if self.ranking is not None and self.logprobs_asked is not None:
            indices, counts = self.logprobs_asked
            ranking = self.ranking.read(remaining)
            entries = read_logprobs(ranking, counts)
            if self.listed is not None:
                self.listed.add_to(entries, remaining)
            logprobs = dict(zip(indices.tolist(), entries, strict=True))
            if not ranking.is_sound.all():
                nonfinite = sorted({*nonfinite, *indices[~ranking.is_sound].tolist()})
        if self.candidates is not None and self.candidates_asked is not None:
            indices, counts = self.candidates_asked
            best = self.candidates.read(remaining)
            candidates = dict(zip(indices.tolist(), read_candidates(best, counts), strict=True))
        for row in nonfinite:
            logprobs.pop(row, None)
            candidates.pop(row, None)
        return SampledTokens(token_ids, logprobs, candidates, tuple(nonfinite))


class Logprobs(NamedTuple):
    ranking: Deferred[Ranking]
    num_top: int

    def tensors(self) -> Sequence[torch.Tensor]:
        return self.ranking.tensors

    def assemble(self, hosts: Sequence[torch.Tensor] = ()) -> list[TokenLogprobs]:
        """Result for prompt tokens, once copied. hosts: copies of `tensors` on the host. Raises NonFiniteLogitsError
        with the indices of rows with NaN or plus infinity."""
        ranking = self.ranking.read(iter(hosts))
        bad = np.flatnonzero(~ranking.is_sound)
        if bad.size:
            raise NonFiniteLogitsError(bad.tolist())
        return read_logprobs(ranking, [self.num_top] * len(ranking.token_ids))


def read_logprobs(ranking: Ranking, counts: Sequence[int]) -> list[TokenLogprobs]:
    """TokenLogprobs of each row. counts: [N], best tokens that each row wants."""
    columns = (ranking.token_ids, ranking.logprobs, ranking.ranks, *ranking.best)
    entries = zip(*(column.tolist() for column in columns), counts, strict=True)
    return [
        TokenLogprobs([token, *tokens[:count]], [value, *values[:count]], rank)
        for token, value, rank, tokens, values, count in entries
    ]


def read_candidates(best: Best, counts: Sequence[int]) -> list[Candidates]:
    """Candidates of each beam. counts: [N], most candidates that each row wants. A row has one even if everything is
    forbidden."""
    num_allowed = np.maximum(1, (best.scores > LOWEST_SCORE).sum(axis=1)).tolist()
    columns = zip(best.token_ids.tolist(), best.scores.tolist(), counts, num_allowed, strict=True)
    return [
        Candidates(tokens[: min(wanted, allowed)], scores[: min(wanted, allowed)])
        for tokens, scores, wanted, allowed in columns
    ]
