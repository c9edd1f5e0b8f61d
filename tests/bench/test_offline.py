from __future__ import annotations

import random
from typing import Any

import pytest

from quire.bench.datasets import PromptSpec
from quire.bench.offline import BatchShape, measure_latency, measure_throughput
from quire.errors import UserError
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams


class FakeEngine:
    """Answers every prompt with `max_tokens` tokens; each call moves its clock by the next of `durations`."""

    def __init__(self, durations: list[float]) -> None:
        self.durations = iter(durations)
        self.now = 100.0
        self.calls: list[tuple[list[dict[str, Any]], list[SamplingParams]]] = []

    def timer(self) -> float:
        return self.now

    def generate(self, prompts: list[dict[str, Any]], params: list[SamplingParams]) -> list[RequestOutput]:
        self.calls.append((prompts, params))
        self.now += next(self.durations)
        return [
            RequestOutput(
                request_id=str(index),
                prompt=None,
                prompt_token_ids=prompt.get("prompt_token_ids", [1, 2, 3]),
                outputs=[CompletionOutput(0, "", list(range(param.max_tokens or 0)))],
                finished=True,
                num_cached_tokens=index,
            )
            for index, (prompt, param) in enumerate(zip(prompts, params, strict=True))
        ]


SHAPE = BatchShape(batch_size=3, input_len=5, output_len=4, vocab_size=50)


def test_latency_times_the_repeats_and_not_the_warm_up() -> None:
    engine, ticks = FakeEngine([90.0, 80.0, 1.0, 2.0, 3.0]), []
    result = measure_latency(
        engine.generate,
        SHAPE,
        num_warmups=2,
        num_repeats=3,
        seed=1,
        on_done=lambda: ticks.append(1),
        timer=engine.timer,
    )
    assert result.seconds == (1.0, 2.0, 3.0)
    assert result.distribution.mean == 2.0
    assert result.output_throughput == 3 * 4 / 2.0
    assert result.seconds_per_step == 0.5
    assert len(ticks) == 5


def test_latency_batches_have_the_shape_and_never_repeat_a_prompt() -> None:
    engine = FakeEngine([1.0] * 4)
    measure_latency(
        engine.generate, SHAPE, num_warmups=1, num_repeats=3, seed=1, on_done=lambda: None, timer=engine.timer
    )
    prompts = [tuple(prompt["prompt_token_ids"]) for batch, _ in engine.calls for prompt in batch]
    assert {len(prompt) for prompt in prompts} == {5}
    assert len(set(prompts)) == len(prompts) == 12
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
    for _, params in engine.calls:
        assert {(p.max_tokens, p.ignore_eos, p.temperature, p.detokenize) for p in params} == {(4, True, 0.0, False)}


def test_batches_depend_on_the_seed() -> None:
    one, two = (next(SHAPE.batches(random.Random(seed))) for seed in (1, 2))
    assert one == next(SHAPE.batches(random.Random(1)))
    assert one != two


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_throughput_counts_all_tokens(ignore_eos: bool) -> None:
    engine = FakeEngine([4.0])
    prompts = [PromptSpec(max_tokens=6, token_ids=(1, 2)), PromptSpec(max_tokens=2, text="hello")]
    result = measure_throughput(engine.generate, prompts, ignore_eos=ignore_eos, timer=engine.timer)
    assert (result.num_requests, result.num_prompt_tokens, result.num_output_tokens) == (2, 5, 8)
    assert result.num_cached_tokens == 1
    assert result.requests_per_second == 0.5
    assert result.output_throughput == 2.0
    assert result.total_throughput == 13 / 4
    ((inputs, params),) = engine.calls
    assert inputs == [{"prompt_token_ids": [1, 2]}, {"prompt": "hello"}]
    assert [param.max_tokens for param in params] == [6, 2]
    assert {param.ignore_eos for param in params} == {ignore_eos}


def test_chat_messages_are_refused_offline() -> None:
    engine = FakeEngine([1.0])
    prompt = PromptSpec(max_tokens=1, messages=({"role": "user", "content": "hi"},))
    with pytest.raises(UserError, match="offline"):
        measure_throughput(engine.generate, [prompt], ignore_eos=True, timer=engine.timer)
    assert engine.calls == []
