"""Builders for sampler tests, and a naive sampler of one row that the batched one is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from quire.sampling.batch import SampleBatch, TokenMasks
from quire.sampling.parameters import SamplingRows
from quire.sampling.plain_kernels import PlainKernels
from quire.sampling.results import Logprobs, SampledTokens
from quire.sampling.sampler import Sampler
from quire.sampling_params import SamplingParams
from quire.step import SequenceSampling

NEVER = 10**6
"""What the token table holds behind a row's tokens: no kernel may take it for a token."""


class Platform(Protocol):
    """Where kernels run, and which."""

    def array(self, values: np.ndarray) -> Any:
        """[N] or [N, M] integers, where the kernels compute."""

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of the logits, where the kernels compute."""

    def kernels(self, rows: SamplingRows) -> Any: ...

    def write(self, kernels: Any, row: int, words: np.ndarray) -> None:
        """Give the kernels the words of a row."""


class Host:
    """Kernels for host memory."""

    def __init__(self, kernels: Callable[[SamplingRows], Any] = PlainKernels) -> None:
        self.kernels = kernels

    def array(self, values: np.ndarray) -> np.ndarray:
        return values.copy()

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.to(torch.float32, copy=True)

    def write(self, kernels: Any, row: int, words: np.ndarray) -> None:
        """The kernels read the host's columns."""


PLATFORM: Platform = Host()
"""What `sample` uses. Set by the fixtures of this folder."""


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


class Prepared:
    """Cases in rows, ready to be sampled."""

    def __init__(
        self,
        cases: Sequence[Case],
        *,
        rows: Sequence[int] | None = None,
        num_rows: int | None = None,
        platform: Platform | None = None,
        mode: str = "raw_logprobs",
    ) -> None:
        """rows: where the cases live in the table (default: 0, 1, ...). mode: of log-probabilities."""
        self.platform = platform = PLATFORM if platform is None else platform
        self.where = np.arange(len(cases)) if rows is None else np.array(rows, np.int64)
        self.rows = SamplingRows(num_rows or int(self.where.max()) + 1)
        self.kernels = platform.kernels(self.rows)
        self.sampler: Sampler[Any] = Sampler(self.rows, self.kernels, mode)
        histories = [case.prompt + case.output for case in cases]
        self.lengths = np.array([len(history) for history in histories])
        tokens = np.full((len(self.rows.features), int(self.lengths.max()) + 3), NEVER, np.int32)
        for row, case, history in zip(self.where.tolist(), cases, histories, strict=True):
            self.set(row, case)
            tokens[row, : len(history)] = history
        self.batch = SampleBatch(
            rows_host=self.where,
            rows=platform.array(self.where),
            lengths=platform.array(self.lengths),
            num_prompt_tokens=platform.array(np.array([len(case.prompt) for case in cases])),
            token_table=platform.array(tokens),
        )

    def set(self, row: int, case: Case) -> None:
        self.rows.set(row, case.sampling)
        self.platform.write(self.kernels, row, self.rows.words(row))

    def table(self) -> np.ndarray:
        """A copy of the token table."""
        return torch.as_tensor(self.batch.token_table).cpu().numpy().copy()

    def sample(self, logits: torch.Tensor, masks: TokenMasks | None = None) -> SampledTokens:
        """Sample a copy of the logits; check that the token table has the tokens, and nothing else changed in it."""
        before = self.table()
        samples = self.sampler.sample(self.platform.logits(logits), self.batch, masks)
        sampled = samples.assemble([tensor.cpu() for tensor in samples.tensors()])
        before[self.where, self.lengths] = sampled.token_ids
        assert (self.table() == before).all()
        return sampled

    def edited(self, logits: torch.Tensor) -> np.ndarray:
        """The scores after all rules, in float64."""
        scores = self.kernels.set_aside(self.platform.logits(logits), 0, None)[0]
        self.sampler._edit(scores, self.batch, self.rows.used(self.where))
        return torch.as_tensor(scores).cpu().numpy().astype(np.float64)

    def logprobs(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> Callable[[], Any]:
        """What finishes the log-probabilities of given tokens."""
        targets = self.platform.array(np.array([0, *token_ids, 0], np.int64))[1:-1]
        scored: Logprobs = self.sampler.logprobs(self.platform.logits(logits), targets, num_top)
        return lambda: scored.assemble([tensor.cpu() for tensor in scored.tensors()])


def sample(
    logits: torch.Tensor,
    cases: Sequence[Case],
    *,
    rows: Sequence[int] | None = None,
    num_rows: int | None = None,
    platform: Platform | None = None,
) -> SampledTokens:
    """Sample `cases` from a copy of `logits`; rows: where they live in the table (default: 0, 1, ...)."""
    return Prepared(cases, rows=rows, num_rows=num_rows, platform=platform).sample(logits)


def sample_one(logits: torch.Tensor, case: Case) -> int:
    return int(sample(logits[None], [case]).token_ids[0])


def random_case(rng: np.random.Generator, vocab_size: int, **more: Any) -> Case:
    """Every rule on or off at random."""

    def maybe(value: object, default: object) -> object:
        return value if rng.random() < 0.5 else default

    tokens = rng.integers(0, vocab_size, 90).tolist()
    output = tokens[60 : 60 + int(rng.integers(0, 30))] * 2
    params = SamplingParams(
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        logit_bias=maybe({int(t): float(rng.uniform(-5, 5)) for t in rng.integers(0, vocab_size, 9)}, None),
        allowed_token_ids=maybe(rng.choice(vocab_size, 40, replace=False).tolist(), None),
        min_tokens=maybe(int(rng.integers(0, 60)), 0),
        max_tokens=100,
        **more,
    )
    bad = [[int(token)] for token in rng.integers(0, vocab_size, 3)]
    bad += [[*output[len(output) - size :], int(rng.integers(0, vocab_size))] for size in (1, 2, 5)]
    bad += [[*output[len(output) - 4 :], 1, int(rng.integers(0, vocab_size))]]
    stop = rng.integers(0, vocab_size, 4).tolist()
    prompt = tokens[: int(rng.integers(1, 60))]
    return Case(params, prompt=prompt, output=output, stop=stop, bad=maybe(bad, []), seed=int(rng.integers(2**62)))


def beam(num_candidates: int, **more: Any) -> Case:
    case = {name: more.pop(name) for name in ("prompt", "output", "stop") if name in more}
    made = Case(SamplingParams(use_beam_search=True, n=2, **more), **case)
    made.sampling = msgspec.structs.replace(made.sampling, num_candidates=num_candidates)
    return made


def random_logits(rows: int, size: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows)) * scale


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
