"""`quire bench latency` and `throughput`: the offline API, timed to the last token."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.bench.datasets import LengthRange, PromptSpec, RandomPrompts
from quire.bench.metrics import Distribution, summarize_values
from quire.errors import UserError
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams


class Generator(Protocol):
    def __call__(self, prompts: list[dict[str, Any]], params: list[SamplingParams], /) -> list[RequestOutput]: ...


Timer = Callable[[], float]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Batch of `latency`: the same shape in every repeat, with fresh random tokens, so no prefix repeats."""

    batch_size: int
    input_len: int
    output_len: int
    vocab_size: int

    def batches(self, rng: random.Random) -> Iterator[list[PromptSpec]]:
        lengths = LengthRange(self.input_len, self.input_len), LengthRange(self.output_len, self.output_len)
        maker = RandomPrompts(self.batch_size, *lengths, token_ids=LengthRange(0, self.vocab_size - 1))
        while True:
            yield maker.draw(rng)


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """Times of `quire bench latency`: seconds of each repeat. Rates use the mean."""

    shape: BatchShape
    seconds: tuple[float, ...]
    distribution: Distribution

    @property
    def output_throughput(self) -> float:
        return self.shape.batch_size * self.shape.output_len / self.distribution.mean

    @property
    def seconds_per_step(self) -> float:
        """Mean seconds per step, the prompt's computation included."""
        return self.distribution.mean / self.shape.output_len


def measure_latency(
    generate: Generator,
    shape: BatchShape,
    *,
    num_warmups: int,
    num_repeats: int,
    seed: int,
    on_done: Callable[[], None],
    timer: Timer = time.perf_counter,
) -> LatencyResult:
    """Run one batch `num_warmups + num_repeats` times; time the last `num_repeats`."""
    seconds = []
    batches = shape.batches(random.Random(seed))
    for repeat in range(num_warmups + num_repeats):
        elapsed, _ = _timed(generate, next(batches), ignore_eos=True, timer=timer)
        if repeat >= num_warmups:
            seconds.append(elapsed)
        on_done()
    distribution = summarize_values(seconds)
    assert distribution is not None, "at least one repeat"
    return LatencyResult(shape, tuple(seconds), distribution)


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """Times of `quire bench throughput`: one run over all prompts. Token counts are totals."""

    seconds: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    outputs: list[list[int]]

    @property
    def requests_per_second(self) -> float:
        return self.num_requests / self.seconds

    @property
    def output_throughput(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def total_throughput(self) -> float:
        return (self.num_prompt_tokens + self.num_output_tokens) / self.seconds


def measure_throughput(
    generate: Generator,
    prompts: Sequence[PromptSpec],
    *,
    ignore_eos: bool,
    predicted: Sequence[list[int]] = (),
    timer: Timer = time.perf_counter,
) -> ThroughputResult:
    """Submit all prompts at once and wait for the last token. predicted: output of each, for an oracle."""
    elapsed, outputs = _timed(generate, prompts, ignore_eos=ignore_eos, predicted=predicted, timer=timer)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    assert not predicted or texts == list(predicted), "drafts change no token"
    return ThroughputResult(
        outputs=texts,
        seconds=elapsed,
        num_requests=len(outputs),
        num_prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        num_output_tokens=sum(len(c.token_ids) for output in outputs for c in output.outputs),
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
    )


def _timed(
    generate: Generator,
    prompts: Sequence[PromptSpec],
    *,
    ignore_eos: bool,
    timer: Timer,
    predicted: Sequence[list[int]] = (),
) -> tuple[float, list[RequestOutput]]:
    inputs = [_input(prompt) for prompt in prompts]
    for prompt, text in zip(inputs, predicted, strict=False):
        prompt["prediction"] = text
    params = [
        SamplingParams(temperature=0.0, max_tokens=prompt.max_tokens, ignore_eos=ignore_eos, detokenize=False)
        for prompt in prompts
    ]
    start = timer()
    outputs = generate(inputs, params)
    return timer() - start, outputs


def _input(prompt: PromptSpec) -> dict[str, Any]:
    if prompt.token_ids is not None:
        return {"prompt_token_ids": list(prompt.token_ids)}
    if prompt.text is not None:
        return {"prompt": prompt.text}
    raise UserError("an offline benchmark takes prompts and token ids, not chat messages", param="dataset")
