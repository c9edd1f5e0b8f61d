"""Results of sampling: what kernels leave, on the device until it is read, and what a step reports."""

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
"""Scores below this one belong to banned tokens: neither the model nor other rules produce one as low."""

Result = TypeVar("Result")


class Best(NamedTuple):
    """The best tokens of N rows, best first: token_ids and scores ([N, K])."""

    token_ids: np.ndarray
    scores: np.ndarray


class Ranking(NamedTuple):
    """One token of each of N rows: token_ids, logprobs, ranks (1 for the best), [N] each. is_sound: [N] bool. A row
    that is not sound has NaN or plus infinity, or its token is impossible, and nothing else of it is valid. best: the
    best tokens and their log-probabilities, at least as many as any row wants."""

    is_sound: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    best: Best


class Deferred(NamedTuple, Generic[Result]):
    """What a kernel has enqueued. tensors: what must be copied to the host, none where it has been computed there.
    read: takes the copies of these tensors from an iterator and returns the result."""

    tensors: Sequence[torch.Tensor]
    read: Callable[[Iterator[torch.Tensor]], Result]


def ready(result: Result) -> Deferred[Result]:
    """A result that is on the host already."""
    return Deferred((), lambda _: result)


class SampledTokens(NamedTuple):
    """token_ids: [R], aligned with the batch. logprobs, candidates: by batch index, where asked for.
    nonfinite: indices of rows whose logits are NaN or infinite; they have token 0, and neither of the others."""

    token_ids: Sequence[int]
    logprobs: dict[int, TokenLogprobs]
    candidates: dict[int, Candidates]
    nonfinite: Sequence[int] = ()


class ListedLogprobs(NamedTuple):
    """Log-probabilities of tokens that the rows name. values: how far the logit of each is above the chosen token's,
    whose log-probability the ranking has; or, where they are not normalized, the logits."""

    values: Deferred[np.ndarray]
    listed: Listed
    normalized: bool

    def add_to(self, entries: Sequence[TokenLogprobs], hosts: Iterator[torch.Tensor]) -> None:
        """entries: of the rows that ask for log-probabilities."""
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
    """What sampling R rows leaves. token_ids: [R], -1 for rows with NaN or plus infinity, or without any finite score.
    ranking, candidates: of the rows that ask for log-probabilities and of beams, None where no row asks. failed: rows
    that cannot go on, and why."""

    token_ids: Deferred[list[int]]
    ranking: Deferred[Ranking] | None = None
    candidates: Deferred[Best] | None = None
    logprobs_asked: Asked | None = None
    candidates_asked: Asked | None = None
    listed: ListedLogprobs | None = None
    failed: Mapping[int, str] = MappingProxyType({})

    def tensors(self) -> list[torch.Tensor]:
        """What must be copied to the host."""
        parts = (self.token_ids, self.ranking, None if self.listed is None else self.listed.values, self.candidates)
        return [tensor for part in parts if part is not None for tensor in part.tensors]

    def assemble(self, hosts: Iterable[torch.Tensor] = ()) -> SampledTokens:
        """hosts: `tensors` on the host; of an iterator no more are taken."""
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
    """Log-probabilities of given tokens, of which each asks for `num_top` alternatives."""

    ranking: Deferred[Ranking]
    num_top: int

    def tensors(self) -> Sequence[torch.Tensor]:
        """What must be copied to the host."""
        return self.ranking.tensors

    def assemble(self, hosts: Sequence[torch.Tensor] = ()) -> list[TokenLogprobs]:
        """hosts: `tensors` on the host. Raises NonFiniteLogitsError with the indices of rows that are not sound."""
        ranking = self.ranking.read(iter(hosts))
        bad = np.flatnonzero(~ranking.is_sound)
        if bad.size:
            raise NonFiniteLogitsError(bad.tolist())
        return read_logprobs(ranking, [self.num_top] * len(ranking.token_ids))


def read_logprobs(ranking: Ranking, counts: Sequence[int]) -> list[TokenLogprobs]:
    """counts: [N], how many of the best tokens each row wants."""
    columns = (ranking.token_ids, ranking.logprobs, ranking.ranks, *ranking.best)
    entries = zip(*(column.tolist() for column in columns), counts, strict=True)
    return [
        TokenLogprobs([token, *tokens[:count]], [value, *values[:count]], rank)
        for token, value, rank, tokens, values, count in entries
    ]


def read_candidates(best: Best, counts: Sequence[int]) -> list[Candidates]:
    """counts: [N], how many each row wants at most. A row has one even if everything is forbidden."""
    num_allowed = np.maximum(1, (best.scores > LOWEST_SCORE).sum(axis=1)).tolist()
    columns = zip(best.token_ids.tolist(), best.scores.tolist(), counts, num_allowed, strict=True)
    return [
        Candidates(tokens[: min(wanted, allowed)], scores[: min(wanted, allowed)])
        for tokens, scores, wanted, allowed in columns
    ]
