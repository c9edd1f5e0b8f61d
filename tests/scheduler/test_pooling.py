"""Pooled requests: one vector instead of tokens, in steps that they share with others."""

from __future__ import annotations

from typing import Any

import pytest

from quire.request import FinishReason
from tests.fakes.core import CoreDriver, generate_alone, make_config, pool_alone

DAMAGING = 95


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 90 + 1 for i in range(length)]


def make_driver(*, nonfinite_token: int | None = None, **options: Any) -> CoreDriver:
    return CoreDriver(make_config(**options), nonfinite_token=nonfinite_token, record=True)


@pytest.mark.parametrize("queue_depth", [1, 2, 3])
@pytest.mark.parametrize("max_prefill_chunk", [None, 3])
def test_a_pooled_and_a_generated_request_share_a_step(queue_depth: int, max_prefill_chunk: int | None) -> None:
    driver = make_driver(queue_depth=queue_depth, max_prefill_chunk=max_prefill_chunk)
    driver.add("first", prompt(9), max_tokens=6)
    driver.add("pooled", prompt(9, start=4), pooling=True, max_tokens=1)
    driver.add("last", prompt(9, start=8), max_tokens=6)
    driver.run()
    [shared] = [plan for plan in driver.executor.plans if plan.pooled]
    assert (shared.pooled, len(shared.sample_seq_ids)) == ([1], 3)
    assert driver.pooled == {"pooled": pool_alone(prompt(9, start=4))}
    assert driver.finished["pooled", 0] is FinishReason.STOP
    assert driver.tokens["pooled", 0] == []
    assert driver.tokens["first", 0] == generate_alone(prompt(9), max_tokens=6)[0]
    stats = driver.core.stats()
    assert (stats.finished_requests_total, stats.generation_tokens_total) == (3, 12)


def test_it_hits_the_prefix_cache_and_fills_it() -> None:
    driver = make_driver(block_size=4)
    for name in ("first", "again"):
        driver.add(name, prompt(13), pooling=True, max_tokens=1)
        driver.run()
    driver.add("generated", prompt(13), max_tokens=3)
    driver.run()
    assert driver.pooled["first"] == driver.pooled["again"] == pool_alone(prompt(13))
    assert [plan.num_tokens for plan in driver.executor.plans][:3] == [[13], [1], [1]]


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("queue_depth", [1, 2])
def test_preempted_in_the_middle_of_its_prompt(preemption_mode: str, queue_depth: int) -> None:
    driver = make_driver(
        num_blocks=9,
        block_size=2,
        max_prefill_chunk=1,
        queue_depth=queue_depth,
        windows=(None,),
        preemption_mode=preemption_mode,
        num_host_blocks=20 if preemption_mode == "swap" else 0,
        enable_prefix_caching=False,
    )
    driver.add("generated", prompt(3), max_tokens=9)
    driver.add("pooled", prompt(9, start=4), pooling=True, max_tokens=1)
    driver.run()
    assert driver.core.stats().preemptions_total > 0
    assert driver.pooled == {"pooled": pool_alone(prompt(9, start=4))}
    assert driver.tokens["generated", 0] == generate_alone(prompt(3), max_tokens=9)[0]


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_aborted_with_its_vector_in_flight(queue_depth: int) -> None:
    driver = make_driver(queue_depth=queue_depth)
    driver.add("generated", prompt(5), max_tokens=6)
    driver.add("pooled", prompt(9, start=4), pooling=True, max_tokens=1)
    driver.add("late", prompt(9, start=6), pooling=True, max_tokens=1, timeout_s=0.001)
    plan = driver.scheduler.schedule(0.0)
    assert plan.pooled == [1, 2]
    driver.scheduler.abort("pooled")
    [expired] = driver.scheduler.expire(1.0)
    assert expired.finish_reason is FinishReason.TIMEOUT
    updates = driver.scheduler.update(driver.executor.execute(plan).result(), 1.0)
    assert [(update.request_id, update.pooled) for update in updates] == [("generated", None)]
    driver.run()
    assert driver.pooled == {}


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_vector_that_is_not_finite_ends_its_request_alone(queue_depth: int) -> None:
    driver = make_driver(nonfinite_token=DAMAGING, queue_depth=queue_depth)
    driver.add("bad", [*prompt(7), DAMAGING], pooling=True, max_tokens=1)
    driver.add("good", prompt(8), pooling=True, max_tokens=1)
    driver.run()
    assert driver.finished["bad", 0] is FinishReason.ERROR
    assert driver.pooled == {"good": pool_alone(prompt(8))}
