"""Builders for sampler tests, and a naive sampler of one row that the batched one is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire.sampling.backend import make_sampler_backend
from quire.sampling.batch import SampleBatch
from quire.sampling.parameters import SamplingRows
from quire.sampling.sampler import SampledTokens, Sampler
from quire.sampling_params import SamplingParams
from quire.step import SequenceSampling

RUNTIME: Any = None
"""The native kernels that `sample` uses; None: the plain twins. Set by the fixture `plain_and_native`."""


class Case:
    """One sequence: its parameters and its tokens."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        seed: int = 0,
        stop: Sequence[int] = (),
        bad: Sequence[Sequence[int]] = (),
    ) -> None:
        self.prompt = list(prompt)
        self.output = list(output)
        self.sampling = SequenceSampling(params, seed, list(stop), [list(words) for words in bad])


def sample(
    logits: torch.Tensor,
    cases: Sequence[Case],
    *,
    rows: Sequence[int] | None = None,
    num_rows: int | None = None,
) -> SampledTokens:
    """Sample `cases` from a copy of `logits`; rows: where they live in the table (default: 0, 1, ...)."""
    where = np.arange(len(cases)) if rows is None else np.array(rows, np.int64)
    table = SamplingRows(num_rows or int(where.max()) + 1)
    histories = [case.prompt + case.output for case in cases]
    tokens = np.full((table.num_rows, max(map(len, histories)) + 1), 10**6, np.int32)
    for row, case, history in zip(where, cases, histories, strict=True):
        table.set(int(row), case.sampling)
        tokens[row, : len(history)] = history
    batch = SampleBatch(
        rows=where,
        lengths=np.array([len(history) for history in histories]),
        num_prompt_tokens=np.array([len(case.prompt) for case in cases]),
        token_ids=tokens,
    )
    return Sampler(table, make_sampler_backend(table, RUNTIME)).sample(logits.clone, batch)


def sample_one(logits: torch.Tensor, case: Case) -> int:
    return int(sample(logits[None], [case]).token_ids[0])


def naive_scores(logits: np.ndarray, case: Case) -> np.ndarray:
    """One row after bias, penalties, bans and allowed tokens, token by token, in float64."""
    params, sampling = case.sampling.params, case.sampling
    scores = logits.astype(np.float64)
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    for token in range(len(scores)):
        if token in case.prompt + case.output:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        count = case.output.count(token)
        scores[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    banned = set(sampling.stop_token_ids) if len(case.output) < params.min_tokens else set()
    for words in sampling.bad_token_sequences:
        prefix = words[:-1]
        if len(prefix) <= len(case.output) and case.output[len(case.output) - len(prefix) :] == prefix:
            banned.add(words[-1])
    for token in range(len(scores)):
        not_allowed = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        if token in banned or not_allowed:
            scores[token] = -np.inf
    return scores


def naive_probabilities(logits: np.ndarray, case: Case) -> np.ndarray:
    """The distribution that a row is drawn from: temperature, then top-k, top-p of what is left, min-p."""
    params = case.sampling.params
    scores = naive_scores(logits, case) / params.temperature
    weights = np.exp(scores - scores.max())
    probabilities = weights / weights.sum()
    order = sorted(range(len(scores)), key=lambda token: -probabilities[token])
    if params.top_k > 0:
        order = order[: params.top_k]
    share, mass, nucleus = params.top_p * sum(probabilities[order]), 0.0, []
    for token in order:
        if params.top_p < 1 and mass >= share:
            break
        nucleus.append(token)
        mass += probabilities[token]
    kept = [token for token in nucleus if probabilities[token] >= params.min_p * probabilities.max()]
    result = np.zeros(len(scores))
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result
