"""Time limits: a request ends in the step after its time is over, wherever it stands, and gives back what it holds."""

from __future__ import annotations

import pytest

from quire.decoding.sequence import Request
from quire.request import EngineRequest, FinishReason
from quire.sampling_params import SamplingParams
from quire.scheduler.queue import Deadlines
from tests.fakes.core import CoreDriver, generate_alone, make_config


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 90 + 1 for i in range(length)]


def updates_of(driver: CoreDriver) -> list:
    """Every update of the core from now on, as it comes out."""
    found = []
    step = driver.core.step

    def listening():  # type: ignore[no-untyped-def]
        outputs = step()
        found.extend(outputs.updates)
        return outputs

    driver.core.step = listening  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_running_request_ends_with_what_it_has(queue_depth: int) -> None:
    driver = CoreDriver(make_config(queue_depth=queue_depth), record=True)
    driver.add("timed", prompt(6), max_tokens=60, timeout_s=0.105)
    driver.add("other", prompt(6, start=4), max_tokens=20)
    for _ in range(10):
        driver.step()
    assert not driver.finished
    driver.step()
    assert driver.finished == {("timed", 0): FinishReason.TIMEOUT}
    driver.scheduler.check()
    stats = driver.core.stats()
    assert (stats.num_running, stats.timed_out_requests_total) == (1, 1)
    tokens = driver.tokens["timed", 0]
    assert tokens == generate_alone(prompt(6), max_tokens=60)[0][: len(tokens)]
    assert len(tokens) == 10, "one for each step that came back before its time was over"
    driver.run()
    assert driver.tokens["other", 0] == generate_alone(prompt(6, start=4), max_tokens=20)[0]


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_its_blocks_serve_others_in_the_same_step(queue_depth: int) -> None:
    driver = CoreDriver(make_config(num_blocks=12, queue_depth=queue_depth, enable_prefix_caching=False))
    driver.add("timed", prompt(40), max_tokens=4, timeout_s=0.015)
    driver.add("next", prompt(30, start=3), max_tokens=4)
    driver.step()
    assert driver.core.stats().num_waiting == 1
    driver.step()
    assert driver.finished == {("timed", 0): FinishReason.TIMEOUT}
    assert driver.core.stats().num_running == 1
    driver.run()
    assert driver.tokens["next", 0] == generate_alone(prompt(30, start=3), max_tokens=4)[0]


def test_a_waiting_request_never_starts_and_its_time_in_the_queue_is_told() -> None:
    driver = CoreDriver(make_config(max_num_seqs=1), record=True)
    driver.add("first", prompt(6), max_tokens=30)
    driver.add("timed", prompt(6, start=4), max_tokens=30, timeout_s=0.1)
    updates = updates_of(driver)
    driver.run()
    assert driver.finished == {("timed", 0): FinishReason.TIMEOUT, ("first", 0): FinishReason.LENGTH}
    assert driver.tokens["timed", 0] == []
    assert [new.seq_id for plan in driver.executor.plans for new in plan.new_sequences] == [0]
    [update] = [update for update in updates if update.request_id == "timed"]
    timing = update.timing
    assert timing is not None
    assert timing.now == timing.first_scheduled >= timing.arrival + 0.1


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_preempted_request_ends_while_it_waits(queue_depth: int) -> None:
    config = make_config(num_blocks=12, max_num_seqs=4, queue_depth=queue_depth, enable_prefix_caching=False)
    driver = CoreDriver(config)
    for index, name in enumerate("ab"):
        driver.add(name, prompt(8, start=index), max_tokens=30)
    driver.add("timed", prompt(8, start=7), max_tokens=30, timeout_s=0.3)
    while driver.core.stats().num_preempted == 0:
        driver.step()
    driver.clock.advance(0.3)
    driver.step()
    assert driver.finished["timed", 0] is FinishReason.TIMEOUT
    tokens = driver.tokens["timed", 0]
    assert tokens == generate_alone(prompt(8, start=7), max_tokens=30)[0][: len(tokens)] != []
    driver.run()


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 8])
def test_siblings_end_together_before_and_after_they_fork(num_steps: int, queue_depth: int) -> None:
    driver = CoreDriver(make_config(queue_depth=queue_depth, max_prefill_chunk=6))
    driver.add("trio", prompt(15), n=3, temperature=1.0, max_tokens=30, timeout_s=1.0)
    for _ in range(num_steps):
        driver.step()
    driver.abort("trio", 1)
    driver.clock.advance(1.0)
    driver.step()
    assert driver.finished == {("trio", index): FinishReason.TIMEOUT for index in (0, 2)}
    driver.scheduler.check()
    driver.run()
    alone = generate_alone(prompt(15), n=3, temperature=1.0, max_tokens=30)
    for index in range(3):
        tokens = driver.tokens.get(("trio", index), [])
        assert tokens == alone[index][: len(tokens)]


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_request_deferred_for_a_prefix_goes_on_without_it(queue_depth: int) -> None:
    driver = CoreDriver(make_config(queue_depth=queue_depth, max_prefill_chunk=4, max_num_batched_tokens=64))
    shared = prompt(24)
    driver.add("timed", [*shared, 5], max_tokens=6, timeout_s=0.025)
    driver.add("waits", [*shared, 6], max_tokens=6)
    driver.run()
    assert driver.core.stats().prefix_cache_waits_total == 1
    assert driver.finished["timed", 0] is FinishReason.TIMEOUT
    assert driver.tokens["waits", 0] == generate_alone([*shared, 6], max_tokens=6)[0]


def test_who_ends_in_time_is_left_alone() -> None:
    driver = CoreDriver(make_config())
    driver.add("quick", prompt(4), max_tokens=2, timeout_s=0.05)
    driver.add("long", prompt(4, start=3), max_tokens=40)
    driver.run()
    assert set(driver.finished.values()) == {FinishReason.LENGTH}
    assert driver.core.stats().timed_out_requests_total == 0


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_prompt_logprobs_that_come_too_late_are_dropped(queue_depth: int) -> None:
    driver = CoreDriver(make_config(queue_depth=queue_depth, max_prefill_chunk=4))
    driver.add("timed", prompt(20), max_tokens=4, prompt_logprobs=0, timeout_s=0.025)
    updates = updates_of(driver)
    driver.run()
    assert driver.finished["timed", 0] is FinishReason.TIMEOUT
    known = driver.prompt_logprob_positions["timed"]
    assert known == list(range(1, len(known) + 1))
    last = max(index for index, update in enumerate(updates) if update.prompt_logprobs is not None)
    assert updates[last + 1 :][-1].finish_reason is FinishReason.TIMEOUT


def test_the_heap_forgets_requests_that_ended_long_before_their_time() -> None:
    deadlines = Deadlines()
    requests = []
    for number in range(1000):
        params = SamplingParams(timeout_s=1e6 if number % 10 else 5.0)
        source = EngineRequest(request_id=str(number), prompt_token_ids=[1], params=params, max_tokens=1, seed=0)
        requests.append(Request(source, float(number), arrival_number=number))
        deadlines.watch(requests[-1])
    for request in requests[20:]:
        deadlines.discard(request)
    assert len(deadlines) == 20
    assert len(deadlines._heap) <= 2 * 20 + 16
    assert deadlines.expired(4.99) == []
    assert deadlines.expired(15.0) == [requests[0], requests[10]]
    assert deadlines.expired(15.0) == [], "each is told once"
