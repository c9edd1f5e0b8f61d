"""What the scheduler promises, one behaviour a test, over the fake executor that verifies every plan."""

from __future__ import annotations

import pytest

from quire.request import FinishReason
from tests.fakes.core import CoreDriver, generate_alone, make_config


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 90 + 1 for i in range(length)]


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_tokens_are_those_of_a_lone_run(queue_depth: int) -> None:
    driver = CoreDriver(make_config(queue_depth=queue_depth))
    prompts = {f"r{i}": prompt(3 + 5 * i, start=i) for i in range(6)}
    for name, ids in prompts.items():
        driver.add(name, ids, max_tokens=10)
    driver.run()
    for name, ids in prompts.items():
        assert driver.tokens[name, 0] == generate_alone(ids, max_tokens=10)[0]
        assert driver.finished[name, 0] is FinishReason.LENGTH


def test_prompts_and_running_sequences_share_a_step() -> None:
    driver = CoreDriver(make_config(max_num_batched_tokens=16), record=True)
    driver.add("first", prompt(4), max_tokens=20)
    driver.step()
    driver.add("second", prompt(40, start=3), max_tokens=4)
    driver.step()
    plan = driver.executor.plans[-1]
    assert plan.num_tokens == [1, 15], "one token for the running sequence, the rest of the budget for the prompt"
    driver.run()


def test_a_long_prompt_leaves_a_token_for_everybody_behind_it() -> None:
    """With a chunk limit a later request may run beside a long prompt; the prompt must not eat its token."""
    driver = CoreDriver(make_config(max_num_batched_tokens=8, max_prefill_chunk=6, num_blocks=200), record=True)
    driver.add("long", prompt(60), max_tokens=2)
    driver.add("short", prompt(2, start=9), max_tokens=12)
    for _ in range(6):
        driver.step()
    with_short = [plan for plan in driver.executor.plans[1:] if len(plan.seq_ids) == 2]
    assert len(with_short) == 5, "the short request made progress in every step"
    driver.run()


def test_budget_and_sequence_limit_hold() -> None:
    driver = CoreDriver(make_config(max_num_seqs=3, max_num_batched_tokens=12), record=True)
    for i in range(10):
        driver.add(f"r{i}", prompt(5 + i), max_tokens=6)
    driver.run()
    assert max(plan.total_tokens for plan in driver.executor.plans) <= 12
    assert max(len(plan.seq_ids) for plan in driver.executor.plans) == 3


def test_first_come_first_served() -> None:
    driver = CoreDriver(make_config(max_num_seqs=1))
    for name in "abc":
        driver.add(name, prompt(6), max_tokens=3)
    driver.run()
    assert [key[0] for key in driver.finished] == ["a", "b", "c"]


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_preemption_takes_the_latest_arrival_and_changes_no_token(queue_depth: int) -> None:
    config = make_config(num_blocks=14, max_num_seqs=4, queue_depth=queue_depth, enable_prefix_caching=False)
    driver = CoreDriver(config)
    prompts = {name: prompt(8, start=i) for i, name in enumerate("abcd")}
    for name, ids in prompts.items():
        driver.add(name, ids, max_tokens=24)
    driver.run()
    assert driver.core.stats().preemptions_total > 0
    assert driver.core.stats().recomputed_tokens_total > 0
    assert next(iter(driver.finished)) == ("a", 0), "the earliest arrival is never preempted"
    for name, ids in prompts.items():
        assert driver.tokens[name, 0] == generate_alone(ids, max_tokens=24)[0]


def test_no_new_request_starts_while_a_preempted_one_waits() -> None:
    driver = CoreDriver(make_config(num_blocks=12, max_num_seqs=4, enable_prefix_caching=False), record=True)
    for i, name in enumerate("abc"):
        driver.add(name, prompt(8, start=i), max_tokens=24)
    for _ in range(2000):
        if driver.core.stats().num_preempted:
            break
        driver.step()
    driver.add("late", prompt(2, start=50), max_tokens=2)
    driver.run()
    order = [new.seq_id for plan in driver.executor.plans for new in plan.new_sequences]
    assert order.index(3) > order.index(2, order.index(2) + 1), "the late request waits for the preempted one"


def test_parallel_samples_share_the_prompt_and_copy_its_partial_block() -> None:
    driver = CoreDriver(make_config(num_blocks=64), record=True)
    driver.add("r", prompt(10), n=4, temperature=1.0, max_tokens=5)
    driver.step()
    stats = driver.core.stats()
    assert stats.num_used_blocks == 3, "ten tokens in blocks of four, shared by four sequences"
    assert stats.num_shared_blocks == 3
    driver.step()
    stats = driver.core.stats()
    assert stats.copied_blocks_total == 3, "the last owner writes in place"
    assert stats.num_used_blocks == 2 + 4
    driver.run()
    completions = [driver.tokens["r", i] for i in range(4)]
    assert completions == generate_alone(prompt(10), n=4, temperature=1.0, max_tokens=5)
    assert len({tuple(tokens) for tokens in completions}) == 4


def test_a_prompt_that_fills_its_blocks_is_forked_without_a_copy() -> None:
    driver = CoreDriver(make_config())
    driver.add("r", prompt(8), n=3, temperature=1.0, max_tokens=6)
    driver.run()
    assert driver.core.stats().copied_blocks_total == 0


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_siblings_are_preempted_and_resumed_together(queue_depth: int) -> None:
    config = make_config(num_blocks=24, max_num_seqs=6, queue_depth=queue_depth, enable_prefix_caching=False)
    driver = CoreDriver(config)
    driver.add("first", prompt(12), max_tokens=40)
    driver.add("pair", prompt(9, start=4), n=3, temperature=1.0, max_tokens=24)
    driver.run()
    assert driver.core.stats().preemptions_total > 0
    alone = generate_alone(prompt(9, start=4), n=3, temperature=1.0, max_tokens=24)
    assert [driver.tokens["pair", i] for i in range(3)] == alone
    assert driver.tokens["first", 0] == generate_alone(prompt(12), max_tokens=40)[0]


def test_prefix_hits_skip_computation_and_change_no_token() -> None:
    driver = CoreDriver(make_config(), record=True)
    shared = prompt(16)
    driver.add("a", [*shared, 5], max_tokens=4)
    driver.run()
    driver.add("b", [*shared, 6], max_tokens=4)
    driver.run()
    assert driver.core.stats().prefix_cache_hits_total == 16
    assert driver.executor.plans[-4].start_positions == [16]
    assert driver.tokens["b", 0] == generate_alone([*shared, 6], max_tokens=4)[0]


def test_a_full_hit_still_computes_the_last_token() -> None:
    driver = CoreDriver(make_config(), record=True)
    for name in "ab":
        driver.add(name, prompt(16), max_tokens=2)
        driver.run()
    assert driver.executor.plans[2].start_positions == [12]
    assert driver.tokens["a", 0] == driver.tokens["b", 0]


def test_tenants_with_different_salts_share_nothing() -> None:
    driver = CoreDriver(make_config())
    for name in "ab":
        driver.add(name, prompt(16), max_tokens=2, salt=name)
        driver.run()
    assert driver.core.stats().prefix_cache_hits_total == 0


def test_generated_tokens_are_cached_too() -> None:
    driver = CoreDriver(make_config())
    driver.add("a", prompt(8), max_tokens=9)
    driver.run()
    turn = prompt(8) + driver.tokens["a", 0]
    driver.add("b", [*turn, 3], max_tokens=2)
    driver.run()
    assert driver.core.stats().prefix_cache_hits_total == 16


def test_least_recently_used_content_is_evicted_first() -> None:
    driver = CoreDriver(make_config(num_blocks=9))
    for name, start in (("a", 1), ("b", 2), ("a2", 1), ("c", 3)):
        driver.add(name, prompt(16, start=start), max_tokens=1)
        driver.run()
    before = driver.core.stats()
    assert before.evictions_total > 0
    driver.add("a3", prompt(16, start=1), max_tokens=1)
    driver.run()
    assert driver.core.stats().prefix_cache_hits_total - before.prefix_cache_hits_total == 12, "a was used last"


def test_resetting_the_prefix_cache_forgets_everything() -> None:
    driver = CoreDriver(make_config())
    driver.add("a", prompt(16), max_tokens=1)
    driver.run()
    assert driver.scheduler.kv.reset_prefix_cache() == 4
    driver.add("b", prompt(16), max_tokens=1)
    driver.run()
    assert driver.core.stats().prefix_cache_hits_total == 0


def test_prompt_logprobs_come_once_even_after_a_preemption_in_the_prompt() -> None:
    config = make_config(num_blocks=14, max_num_batched_tokens=8, max_num_seqs=4, enable_prefix_caching=False)
    driver = CoreDriver(config)
    driver.add("a", prompt(20), max_tokens=20)
    driver.add("b", prompt(12, start=2), max_tokens=16, prompt_logprobs=1)
    driver.run()
    assert driver.core.stats().preemptions_total > 0
    assert driver.prompt_logprob_positions["b"] == list(range(1, 12))


def test_requests_that_want_prompt_logprobs_do_not_skip_their_prompt() -> None:
    driver = CoreDriver(make_config())
    for name in "ab":
        driver.add(name, prompt(16), max_tokens=1, prompt_logprobs=0)
        driver.run()
    assert driver.prompt_logprob_positions["b"] == list(range(1, 16))
    assert driver.core.stats().prefix_cache_queries_total == 0


@pytest.mark.parametrize(
    ("length", "params"), [(40, {"max_tokens": 1}), (4, {"max_tokens": 60}), (8, {"n": 4, "max_tokens": 12})]
)
def test_what_can_never_fit_is_refused_at_the_door(length: int, params: dict[str, int]) -> None:
    driver = CoreDriver(make_config(num_blocks=9))
    driver.add("huge", prompt(length), **params)
    driver.add("small", prompt(4), max_tokens=4)
    driver.run()
    assert "KV blocks" in driver.refused["huge"]
    assert ("small", 0) in driver.finished


def test_the_largest_request_that_is_accepted_finishes() -> None:
    driver = CoreDriver(make_config(num_blocks=9))
    driver.add("fits", prompt(8), n=3, temperature=1.0, max_tokens=9)
    driver.add("other", prompt(20, start=5), max_tokens=17)
    driver.run()
    assert not driver.refused
    assert len(driver.finished) == 4


def test_stop_tokens_and_end_of_sequence() -> None:
    tokens = generate_alone(prompt(5), max_tokens=12)[0]
    third = tokens[2]
    first_seen = tokens.index(third) + 1
    driver = CoreDriver(make_config(queue_depth=2))
    driver.add("stop", prompt(5), max_tokens=12, stop_token_ids=[third])
    driver.add("eos", prompt(5), max_tokens=12, eos=(third,))
    driver.run()
    assert driver.tokens["stop", 0] == driver.tokens["eos", 0] == tokens[:first_seen]
    assert driver.finished["stop", 0] is driver.finished["eos", 0] is FinishReason.STOP


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_abort_frees_everything_at_once(queue_depth: int) -> None:
    driver = CoreDriver(make_config(queue_depth=queue_depth))
    driver.add("a", prompt(20), max_tokens=30)
    driver.add("b", prompt(7), n=3, temperature=1.0, max_tokens=30)
    for _ in range(4):
        driver.step()
    driver.abort("a")
    driver.abort("b")
    driver.abort("unknown")
    assert driver.core.stats().num_used_blocks == 0
    driver.run()
    assert not driver.finished


def test_aborting_the_leader_before_the_prompt_is_computed_passes_the_prompt_on() -> None:
    driver = CoreDriver(make_config(max_num_batched_tokens=8))
    driver.add("r", prompt(30), n=3, temperature=1.0, max_tokens=4)
    driver.step()
    driver.abort("r", 0)
    driver.run()
    alone = generate_alone(prompt(30), n=3, temperature=1.0, max_tokens=4)
    assert [driver.tokens["r", i] for i in (1, 2)] == alone[1:]
    assert ("r", 0) not in driver.tokens


def test_a_duplicate_id_is_refused() -> None:
    driver = CoreDriver(make_config())
    driver.add("a", prompt(4))
    driver.add("a", prompt(4))
    driver.run()
    assert "in use" in driver.refused["a"]
    assert driver.finished["a", 0] is FinishReason.LENGTH


@pytest.mark.parametrize("windows", [(6, 6), (None, 6), (None, 6, 6), (6, 11)])
@pytest.mark.parametrize("queue_depth", [1, 2])
def test_sliding_windows_give_blocks_back(windows: tuple[int | None, ...], queue_depth: int) -> None:
    driver = CoreDriver(make_config(windows=windows, num_blocks=120, queue_depth=queue_depth))
    driver.add("a", prompt(20), max_tokens=60)
    driver.run()
    assert driver.tokens["a", 0] == generate_alone(prompt(20), max_tokens=60)[0]


def test_a_window_bounds_the_blocks_of_a_long_sequence() -> None:
    driver = CoreDriver(make_config(windows=(6, 6), num_blocks=9, max_num_batched_tokens=16))
    driver.add("a", prompt(20), max_tokens=60)
    most = 0
    while driver.core.has_work:
        driver.step()
        driver.scheduler.check()
        most = max(most, driver.core.stats().num_used_blocks)
    assert not driver.refused
    assert most <= 7


def test_prefix_hits_with_windows_need_only_the_window() -> None:
    driver = CoreDriver(make_config(windows=(None, 6), num_blocks=60))
    driver.add("a", prompt(32), max_tokens=12)
    driver.run()
    driver.add("b", [*prompt(32), *driver.tokens["a", 0][:8], 1], max_tokens=4)
    driver.run()
    assert driver.core.stats().prefix_cache_hits_total == 40
