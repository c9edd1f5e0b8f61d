"""Non-finite logits end their request and no other, and its blocks leave the prefix cache."""

from __future__ import annotations

from typing import Any

import pytest

from quire.request import FinishReason
from tests.fakes.core import CoreDriver, generate_alone, make_config
from tests.fakes.disk import FakeDisk

DAMAGING = 95


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 90 + 1 for i in range(length)]


def nonfinite_prompt(length: int, start: int = 1) -> list[int]:
    return [*prompt(length - 1, start), DAMAGING]


def make_driver(**options: Any) -> CoreDriver:
    return CoreDriver(make_config(**options), nonfinite_token=DAMAGING)


def num_hits(driver: CoreDriver) -> int:
    return int(driver.core.stats().prefix_cache_hits_total)


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_the_others_go_on(queue_depth: int) -> None:
    driver = make_driver(queue_depth=queue_depth)
    driver.add("first", prompt(6), max_tokens=12)
    driver.add("bad", nonfinite_prompt(9), max_tokens=12, logprobs=2)
    driver.add("last", prompt(7, start=4), max_tokens=12)
    driver.run()
    assert driver.finished["bad", 0] is FinishReason.ERROR
    assert driver.tokens["bad", 0] == driver.logprobs["bad", 0] == []
    assert driver.tokens["first", 0] == generate_alone(prompt(6), max_tokens=12)[0]
    assert driver.tokens["last", 0] == generate_alone(prompt(7, start=4), max_tokens=12)[0]
    stats = driver.core.stats()
    assert (stats.finished_requests_total, stats.generation_tokens_total) == (3, 24)


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_nonfinite_logits_in_the_middle_keeps_what_came_before(queue_depth: int) -> None:
    """The token behind which it happens is generated: `choose` makes it the fifth."""
    driver = CoreDriver(
        make_config(queue_depth=queue_depth),
        nonfinite_token=DAMAGING,
        choose=lambda sampling, index, token_ids: DAMAGING if index == 4 and token_ids[0] == 50 else 3,
    )
    driver.add("bad", [50, 1, 2], max_tokens=20)
    driver.add("other", [1, 2, 3], max_tokens=20)
    driver.run()
    assert driver.tokens["bad", 0] == [3, 3, 3, 3, DAMAGING]
    assert driver.finished["bad", 0] is FinishReason.ERROR
    assert driver.finished["other", 0] is FinishReason.LENGTH


@pytest.mark.parametrize(
    "params",
    [
        {"n": 3, "temperature": 1.0},
        {"n": 1, "best_of": 2, "temperature": 1.0},
        {"n": 2, "use_beam_search": True},
        {"n": 2, "prompt_logprobs": 1, "temperature": 1.0},
    ],
    ids=str,
)
def test_all_sequences_of_the_request_end(params: dict[str, Any]) -> None:
    driver = make_driver(queue_depth=2)
    driver.add("bad", nonfinite_prompt(9), **params)
    driver.add("other", prompt(5))
    driver.run()
    num_reported = params["n"] if params.get("use_beam_search") else params.get("best_of", params["n"])
    assert {index: reason for (name, index), reason in driver.finished.items() if name == "bad"} == dict.fromkeys(
        range(num_reported), FinishReason.ERROR
    )
    assert driver.tokens["other", 0] == generate_alone(prompt(5))[0]


def test_a_beam_search_has_no_hypotheses_then() -> None:
    """Not even those that ended before: others might have been better."""
    search = {
        "n": 3,
        "use_beam_search": True,
        "max_tokens": 30,
        "early_stopping": "never",
        "stop_token_ids": [*range(30)],
    }
    likely = generate_alone(prompt(9, start=5), **search)
    assert len({len(tokens) for tokens in likely}) > 1, "some end before others"
    driver = CoreDriver(make_config(), nonfinite_token=max(likely, key=len)[-2])
    driver.add("beams", prompt(9, start=5), **search)
    driver.run()
    assert [driver.finished["beams", index] for index in range(3)] == [FinishReason.ERROR] * 3
    assert [driver.tokens["beams", index] for index in range(3)] == [[], [], []]


def test_its_blocks_leave_the_prefix_cache() -> None:
    driver = make_driver(max_num_batched_tokens=8)
    driver.add("sound", prompt(16), max_tokens=1)
    driver.run()
    driver.add("bad", nonfinite_prompt(25), max_tokens=4)  # begins as `sound` did, and caches chunk after chunk
    driver.run()
    assert num_hits(driver) == 16
    assert driver.core.stats().num_cached_blocks == 0
    driver.add("again", nonfinite_prompt(25), max_tokens=4)
    driver.run()
    driver.add("sound again", prompt(16), max_tokens=1)
    driver.run()
    assert num_hits(driver) == 16


def test_a_registered_prefix_stays() -> None:
    driver = make_driver()
    driver.register_prefix("prefix", prompt(10))
    driver.run()
    driver.add("bad", [*prompt(10), DAMAGING], max_tokens=4)
    driver.run()
    driver.add("good", [*prompt(10), 7], max_tokens=4)
    driver.run()
    assert num_hits(driver) == 20
    assert driver.core.stats().num_registered_blocks > 0


def test_a_prefix_with_nonfinite_logits_is_not_registered() -> None:
    driver = make_driver()
    driver.register_prefix("prefix", nonfinite_prompt(10))
    driver.run()
    assert driver.finished["prefix", 0] is FinishReason.ERROR
    assert not driver.scheduler.kv.is_registered("prefix")
    assert driver.core.stats().num_registered_blocks == 0


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_nonfinite_logits_of_a_request_that_was_preempted_meanwhile(preemption_mode: str) -> None:
    """Its result comes when its blocks are gone, or on the host."""
    driver = make_driver(max_num_seqs=1, queue_depth=2, preemption_mode=preemption_mode, num_host_blocks=40)
    driver.add("bad", nonfinite_prompt(9), max_tokens=30, priority=1)
    plan = driver.scheduler.schedule(0.0)  # in flight ...
    driver.add("urgent", prompt(3, start=40), max_tokens=3, priority=-1)
    second = driver.scheduler.schedule(1.0)  # ... when it is preempted
    assert driver.core.stats().preemptions_total == 1
    futures = [driver.executor.execute(each) for each in (plan, second)]
    updates = driver.scheduler.update(futures[0].result(), 2.0)
    assert [(update.request_id, update.finish_reason) for update in updates] == [("bad", FinishReason.ERROR)]
    driver.scheduler.check()
    driver.scheduler.update(futures[1].result(), 3.0)
    while (plan := driver.scheduler.schedule(4.0)) is not None:
        driver.scheduler.update(driver.executor.execute(plan).result(), 5.0)
        driver.scheduler.check()
    assert not driver.scheduler.has_requests
    driver.assert_all_free()


def test_copies_below_the_device_are_not_found_either() -> None:
    disk = FakeDisk()
    driver = CoreDriver(
        make_config(num_host_blocks=40, offload=True, max_num_batched_tokens=8), disk=disk, nonfinite_token=DAMAGING
    )
    driver.add("bad", [*prompt(24), DAMAGING], max_tokens=1)
    for _ in range(3):
        driver.step()
    kv = driver.scheduler.kv
    assert kv.connector.has_content, "the first chunks were copied"
    driver.run()
    assert not kv.connector.has_content
    assert disk.files, "files stay"
    assert driver.core.stats().num_cached_blocks == 0
