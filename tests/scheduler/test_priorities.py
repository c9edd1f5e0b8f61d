"""Order by priority and age: the order of service, which requests are preempted for which, and that none starves."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from quire.request import EngineRequest, FinishReason
from quire.sampling_params import SamplingParams
from tests.fakes.core import CoreDriver, generate_alone, make_config


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 90 + 1 for i in range(length)]


def finish_order(driver: CoreDriver) -> list[str]:
    return [name for name, _ in driver.finished]


def running(driver: CoreDriver) -> list[str]:
    return [sequence.request.request_id for sequence in driver.scheduler._running.sequences]


def assert_as_alone(driver: CoreDriver, requests: dict[str, tuple[list[int], dict]]) -> None:
    for name, (ids, params) in requests.items():
        alone = generate_alone(ids, **params)
        assert [driver.tokens[name, index] for index in range(len(alone))] == alone, name


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_lower_values_start_earlier_and_equal_ones_by_arrival(queue_depth: int) -> None:
    driver = CoreDriver(make_config(max_num_seqs=1, queue_depth=queue_depth))
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 1), ("e", -1), ("f", 0)):
        driver.add(name, prompt(4), max_tokens=2, priority=priority)
    driver.run()
    assert finish_order(driver) == ["c", "e", "a", "f", "b", "d"]


@pytest.mark.parametrize(("seconds", "first"), [(9.99, "late"), (10.01, "early")])
def test_a_level_of_priority_is_worth_priority_seconds(seconds: float, first: str) -> None:
    driver = CoreDriver(make_config(max_num_seqs=1))
    driver.add("early", prompt(4), max_tokens=2, priority=3)
    driver.clock.advance(seconds)
    driver.add("late", prompt(4), max_tokens=2, priority=2)
    driver.run()
    assert finish_order(driver)[0] == first


def test_the_token_budget_goes_to_the_first_in_order() -> None:
    driver = CoreDriver(make_config(max_num_batched_tokens=16), record=True)
    driver.add("long", prompt(60), max_tokens=2)
    driver.step()
    driver.add("urgent", prompt(30, start=5), max_tokens=2, priority=-1)
    driver.step()
    assert driver.executor.plans[-1].num_tokens == [1, 15], "the running one keeps a token, the rest goes to the first"
    driver.step()
    assert running(driver) == ["urgent", "long"]
    assert driver.executor.plans[-1].num_tokens == [15, 1]
    driver.run()
    assert finish_order(driver) == ["urgent", "long"]


def test_a_running_prompt_leaves_an_earlier_one_only_what_it_needs() -> None:
    driver = CoreDriver(make_config(max_num_batched_tokens=16), record=True)
    driver.add("long", prompt(60), max_tokens=2)
    driver.step()
    driver.add("urgent", prompt(5, start=5), max_tokens=2, priority=-1)
    driver.step()
    assert driver.executor.plans[-1].num_tokens == [11, 5]
    driver.run()


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_the_victim_is_the_last_in_order_not_the_latest_arrival(queue_depth: int) -> None:
    config = make_config(num_blocks=13, max_num_seqs=4, queue_depth=queue_depth, enable_prefix_caching=False)
    driver = CoreDriver(config)
    requests = {name: (prompt(8, start=i), {"max_tokens": 24}) for i, name in enumerate("abc")}
    for name, priority in (("a", 2), ("b", 1), ("c", 0)):
        ids, params = requests[name]
        driver.add(name, ids, priority=priority, **params)
    driver.run()
    assert driver.core.stats().preemptions_total > 0
    assert finish_order(driver) == ["c", "b", "a"]
    assert_as_alone(driver, requests)


def test_a_more_important_arrival_goes_before_a_preempted_request_and_others_behind() -> None:
    config = make_config(num_blocks=13, max_num_seqs=8, enable_prefix_caching=False)
    driver = CoreDriver(config, record=True)
    for i, name in enumerate("abc"):
        driver.add(name, prompt(8, start=i), max_tokens=24)
    while not driver.core.stats().num_preempted:
        driver.step()
    driver.add("late", prompt(2, start=50), max_tokens=2)
    driver.add("urgent", prompt(2, start=60), max_tokens=2, priority=-1)
    driver.run()
    order = [new.seq_id for plan in driver.executor.plans for new in plan.new_sequences]
    resumed = order.index(2, order.index(2) + 1)
    assert order.index(4) < resumed < order.index(3)


# -- priority preemption --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize(("priority", "preempts"), [(-1, True), (0, False), (1, False)])
def test_only_a_strictly_better_priority_preempts_for_a_request_slot(
    priority: int, preempts: bool, queue_depth: int
) -> None:
    driver = CoreDriver(make_config(max_num_seqs=2, queue_depth=queue_depth), record=True)
    requests = {name: (prompt(6, start=i), {"max_tokens": 12}) for i, name in enumerate("abc")}
    for name in "ab":
        driver.add(name, requests[name][0], max_tokens=12)
    driver.step()
    driver.add("c", requests["c"][0], max_tokens=12, priority=priority)
    driver.step()
    driver.scheduler.check()
    assert running(driver) == (["c", "a"] if preempts else ["a", "b"])
    driver.run()
    assert driver.core.stats().preemptions_total == preempts
    assert_as_alone(driver, requests)


def test_age_protects_from_preemption() -> None:
    driver = CoreDriver(make_config(max_num_seqs=1))
    driver.add("old", prompt(6), max_tokens=12)
    driver.step()
    driver.clock.advance(10.0)
    driver.add("new", prompt(6, start=2), max_tokens=2, priority=-1)
    driver.run()
    assert driver.core.stats().preemptions_total == 0
    assert finish_order(driver) == ["old", "new"]


def test_age_protects_one_of_two() -> None:
    """Both would be needed, and one comes before: so neither is preempted."""
    driver = CoreDriver(make_config(max_num_seqs=2))
    driver.add("old", prompt(6), max_tokens=20)
    driver.step()
    driver.clock.advance(10.0)
    driver.add("young", prompt(6, start=2), max_tokens=20)
    driver.step()
    driver.clock.advance(0.1)
    driver.add("pair", prompt(6, start=3), n=2, temperature=1.0, max_tokens=2, priority=-1)
    driver.step()
    assert running(driver) == ["old", "young"]
    while ("old", 0) not in driver.finished:
        driver.step()
    assert driver.core.stats().preemptions_total == 0
    driver.run()


@pytest.mark.parametrize("priority", [0, 1])
def test_to_be_earlier_in_the_order_is_not_enough_to_push_out(priority: int) -> None:
    """As a request that comes back to the queue with its leader aborted can be."""
    driver = CoreDriver(make_config(max_num_seqs=1))
    driver.clock.advance(100.0)
    driver.add("runs", prompt(6), max_tokens=12)
    driver.step()
    source = EngineRequest(
        request_id="earlier",
        prompt_token_ids=prompt(6, start=3),
        params=SamplingParams(temperature=0.0, max_tokens=2),
        max_tokens=2,
        seed=0,
        priority=priority,
    )
    driver.scheduler.add_request(source, 0.0)
    driver.run()
    assert driver.core.stats().preemptions_total == 0
    assert finish_order(driver) == ["runs", "earlier"]


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_blocks_are_taken_from_as_few_as_need_be_the_last_in_order_first(queue_depth: int) -> None:
    driver = CoreDriver(
        make_config(num_blocks=26, max_num_batched_tokens=64, queue_depth=queue_depth, enable_prefix_caching=False)
    )
    requests = {name: (prompt(20, start=i), {"max_tokens": 4}) for i, name in enumerate("abcd")}
    requests["urgent"] = (prompt(36, start=9), {"max_tokens": 4})
    for name in "abcd":
        driver.add(name, requests[name][0], max_tokens=4)
    driver.step()
    driver.step()
    assert running(driver) == ["a", "b", "c", "d"]
    driver.add("urgent", requests["urgent"][0], max_tokens=4, priority=-5)
    driver.step()
    assert running(driver) == ["urgent", "a", "b"]
    driver.run()
    assert driver.core.stats().preemptions_total == 2
    assert_as_alone(driver, requests)


def test_no_request_is_preempted_when_it_would_not_be_enough() -> None:
    """The block that is missing belongs to a request that comes before."""
    driver = CoreDriver(make_config(num_blocks=17, max_num_batched_tokens=64, enable_prefix_caching=False))
    driver.add("first", prompt(28), max_tokens=6, priority=-20)
    driver.add("second", prompt(12, start=3), max_tokens=6)
    driver.step()
    driver.add("urgent", prompt(40, start=9), max_tokens=2, priority=-10)
    for _ in range(3):
        driver.step()
    assert running(driver) == ["first", "second"]
    driver.run()
    assert driver.core.stats().preemptions_total == 0


def test_no_request_is_preempted_when_there_is_room() -> None:
    driver = CoreDriver(make_config())
    driver.add("a", prompt(6), max_tokens=6, priority=5)
    driver.step()
    driver.add("urgent", prompt(6, start=9), max_tokens=6, priority=-5)
    driver.step()
    assert running(driver) == ["urgent", "a"]
    assert driver.core.stats().preemptions_total == 0
    driver.run()


def test_no_request_is_preempted_while_the_prefix_is_pending() -> None:
    """The urgent one waits for blocks that another computes, whatever rows there are."""
    driver = CoreDriver(make_config(max_num_seqs=2, max_prefill_chunk=4, max_num_batched_tokens=64))
    shared = prompt(24)
    driver.add("leader", [*shared, 5], max_tokens=6)
    driver.add("other", prompt(6, start=40), max_tokens=20)
    driver.step()
    driver.add("urgent", [*shared, 6], max_tokens=2, priority=-1)
    for _ in range(4):
        driver.step()
    assert driver.core.stats().preemptions_total == 0
    for _ in range(4):
        driver.step()
    assert driver.core.stats().preemptions_total == 1, "then it takes a row"
    driver.run()
    assert driver.core.stats().prefix_cache_hits_total == 20, "for one more block it did not wait"


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_siblings_preempt_and_are_preempted_together(queue_depth: int) -> None:
    driver = CoreDriver(make_config(max_num_seqs=4, queue_depth=queue_depth, num_blocks=100))
    requests = {
        "trio": (prompt(9), {"n": 3, "temperature": 1.0, "max_tokens": 10}),
        "pair": (prompt(11, start=3), {"n": 2, "temperature": 1.0, "max_tokens": 10}),
    }
    driver.add("trio", requests["trio"][0], **requests["trio"][1])
    driver.step()
    driver.step()
    driver.add("pair", requests["pair"][0], priority=-1, **requests["pair"][1])
    driver.step()
    assert set(running(driver)) == {"pair"}
    driver.run()
    assert driver.core.stats().preemptions_total == 1
    assert_as_alone(driver, requests)


def test_two_never_push_each_other_out_in_turns() -> None:
    """The pool holds one of them; each takes part once, whichever comes first in order runs to its end."""
    driver = CoreDriver(make_config(num_blocks=12, enable_prefix_caching=False))
    driver.add("plain", prompt(8), max_tokens=30)
    driver.step()
    driver.add("urgent", prompt(30, start=3), max_tokens=10, priority=-1)
    driver.run()
    assert driver.core.stats().preemptions_total == 1
    assert finish_order(driver) == ["urgent", "plain"]


def test_the_step_that_preempts_leaves_budget_for_the_arrival() -> None:
    """A long prompt before it takes all tokens of the step: to preempt the third would be idle work."""
    driver = CoreDriver(make_config(max_num_seqs=2, max_num_batched_tokens=8, num_blocks=100))
    driver.add("long", prompt(40), max_tokens=4, priority=-50)
    driver.add("short", prompt(4, start=3), max_tokens=30, priority=0)
    while len(running(driver)) < 2:
        driver.step()
    driver.add("longer", prompt(40, start=5), max_tokens=4, priority=-50)
    driver.step()
    driver.run()
    assert driver.core.stats().preemptions_total <= 1
    assert finish_order(driver)[-1] == "short"


# -- no request starves ---------------------------------------------------------------------------------------------

_SECONDS = 0.1
_WORST = 10


@settings(max_examples=50, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(
            st.floats(0.0, 1.0),  # seconds after the arrival before
            st.integers(-_WORST, _WORST),
            st.integers(1, 10),
            st.integers(1, 6),
        ),
        min_size=2,
        max_size=14,
    ),
    queue_depth=st.sampled_from([1, 2]),
)
def test_only_arrivals_within_a_bound_go_before_a_request(
    arrivals: list[tuple[float, int, int, int]], queue_depth: int
) -> None:
    """One row, so that the order of the ends is the order of the service."""
    driver = CoreDriver(
        make_config(max_num_seqs=1, priority_seconds=_SECONDS, queue_depth=queue_depth, enable_prefix_caching=False)
    )
    arrived = {}
    for number, (gap, priority, length, max_tokens) in enumerate(arrivals):
        deadline = driver.clock.now() + gap
        while driver.core.has_work and driver.clock.now() < deadline:
            driver.step()
        name = f"r{number}"
        arrived[name] = (driver.clock.now(), priority)
        driver.add(name, prompt(length, start=number), max_tokens=max_tokens, priority=priority)
    driver.run()
    order = finish_order(driver)
    assert sorted(order) == sorted(arrived)
    for place, name in enumerate(order):
        arrival, priority = arrived[name]
        for other in order[:place]:
            other_arrival, other_priority = arrived[other]
            if other_arrival > arrival:
                assert other_arrival <= arrival + (priority - other_priority) * _SECONDS + 1e-9


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_a_stream_of_important_requests_does_not_starve_the_least_important_one(queue_depth: int) -> None:
    """More work arrives than can be done, for ever. Those that go before "last" arrive within 20 levels of 0.1 s."""
    driver = CoreDriver(make_config(max_num_seqs=2, priority_seconds=_SECONDS, queue_depth=queue_depth))
    driver.add("last", prompt(6), max_tokens=8, priority=_WORST)
    number = 0
    while ("last", 0) not in driver.finished:
        driver.add(f"r{number}", prompt(3, start=number), max_tokens=3, priority=-_WORST)
        number += 1
        driver.step()
        driver.scheduler.check()
        assert number < 1500, "it starves"
    earlier = [name for name in finish_order(driver) if name != "last"]
    assert max(int(name[1:]) for name in earlier) <= 20 * _SECONDS / 0.01 + 2
    assert driver.finished["last", 0] is FinishReason.LENGTH
    driver.run()
