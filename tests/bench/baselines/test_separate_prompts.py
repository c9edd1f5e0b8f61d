"""The paper's way to form a batch, over the product's scheduler and KV cache."""

from __future__ import annotations

import random

from quire.bench.baselines.systems import PROMPTS_APART, SYSTEMS
from tests.fakes.core import CoreClient, generate_alone, make_config
from tests.fakes.executor import FakeExecutor


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed).randrange(1, 97) for _ in range(length)]


def make_client(num_blocks: int) -> tuple[CoreClient, FakeExecutor]:
    config = make_config(num_blocks=num_blocks, enable_prefix_caching=False, max_num_batched_tokens=512)
    executor = FakeExecutor(record=True)
    return CoreClient(config, executor, SYSTEMS[PROMPTS_APART]), executor


def test_prompts_run_alone() -> None:
    client, executor = make_client(64)
    client.add("one", prompt(1, 6), max_tokens=4)
    client.step()
    client.add("two", prompt(2, 5), max_tokens=2)
    client.run()
    assert [plan.num_tokens for plan in executor.plans] == [[6], [5], [1, 1], [1], [1]]


def test_tokens_are_the_products_under_preemption() -> None:
    client, executor = make_client(20)
    requests = {f"r{number}": prompt(number, 3 + 5 * number % 17) for number in range(10)}
    for name, tokens in requests.items():
        client.add(name, tokens, max_tokens=20)
    client.run()
    assert client.core.stats().preemptions_total > 0
    for name, tokens in requests.items():
        assert [client.tokens[name, 0]] == generate_alone(tokens, max_tokens=20)
    mixed = [plan for plan in executor.plans if max(plan.num_tokens) > 1 and min(plan.num_tokens) == 1]
    assert not mixed, "a step computes prompts or next tokens"
