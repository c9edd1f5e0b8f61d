"""The behaviour of the scheduler, one property a test, over the fake executor that verifies every plan."""

from __future__ import annotations

from collections import Counter

import pytest

from quire.decoding.sequence import Request, Sequence
from quire.kv_cache.block_table import BlockAllocation
from quire.request import EngineRequest, FinishReason
from quire.sampling_params import SamplingParams
from quire.scheduler.plan_builder import PlanBuilder
from quire.scheduler.queue import RequestQueue
from quire.step import SequenceSampling
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
    stats = driver.core.stats()
    assert stats.preemptions_total > 3, "three can be preempted, so one of them was more than once"
    assert stats.scheduled_tokens_total == 4 * (8 + 23) + stats.recomputed_tokens_total
    assert next(iter(driver.finished)) == ("a", 0), "the earliest arrival is never preempted"
    for name, ids in prompts.items():
        assert driver.tokens[name, 0] == generate_alone(ids, max_tokens=24)[0]


def test_a_preempted_request_goes_before_those_that_never_ran() -> None:
    driver = CoreDriver(make_config(num_blocks=12, max_num_seqs=3, enable_prefix_caching=False), record=True)
    for i, name in enumerate("abcd"):
        driver.add(name, prompt(8, start=i), max_tokens=24)
    driver.run()
    assert driver.core.stats().preemptions_total > 0
    assert [name for name, _ in driver.finished] == ["a", "b", "c", "d"]


def test_a_preempted_request_waits_for_the_value_of_its_last_sample() -> None:
    """However many plans are made ahead: its row can only be made anew from tokens that are known."""
    driver = CoreDriver(make_config(num_blocks=4, enable_prefix_caching=False))
    scheduler = driver.scheduler
    for seq_id, name in enumerate("abc"):
        driver.add(name, prompt(4, start=seq_id), max_tokens=4)
    plans = [scheduler.schedule(0.0) for _ in range(2)]
    assert [plan.seq_ids for plan in plans] == [[0, 1, 2], [0, 1]]
    scheduler.abort("b")
    plans.append(scheduler.schedule(0.0))
    assert plans[-1].seq_ids == [0], "two blocks are free, but the third sequence's first token is not known"
    for plan in plans:
        scheduler.update(driver.executor.execute(plan).result(), 0.0)
        scheduler.check()
    plan = scheduler.schedule(0.0)
    assert [len(new.token_ids) for new in plan.new_sequences] == [5]


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


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_siblings_scheduled_before_their_request_is_preempted_are_taken_back(
    queue_depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same step one sibling got a block (or a copy of one) and the next found none: for every size of pool."""
    taken_back: Counter[str] = Counter()
    rollback = PlanBuilder.rollback

    def count(self: PlanBuilder, request: Request) -> list[tuple[Sequence, BlockAllocation]]:
        before = len(self.samples), len(self.plan.block_copies)
        taken_back["new blocks"] += bool(self.plan.new_blocks)
        undone = rollback(self, request)
        taken_back["samples"] += before[0] - len(self.samples)
        taken_back["copies"] += before[1] - len(self.plan.block_copies)
        return undone

    monkeypatch.setattr(PlanBuilder, "rollback", count)
    requests = {"first": (prompt(4), {"max_tokens": 40}), "trio": (prompt(17, start=4), {"n": 3, "max_tokens": 14})}
    alone = {name: generate_alone(ids, temperature=1.0, **params) for name, (ids, params) in requests.items()}
    options = {"queue_depth": queue_depth, "max_prefill_chunk": 1, "enable_prefix_caching": False}
    for num_blocks in range(16, 28):
        driver = CoreDriver(make_config(num_blocks=num_blocks, **options), record=True)
        for name, (ids, params) in requests.items():
            driver.add(name, ids, temperature=1.0, **params)
            for _ in range(20):
                driver.step()
        driver.run()
        assert {name: [driver.tokens[name, i] for i in range(len(alone[name]))] for name in alone} == alone
        stats = driver.core.stats()
        computed = sum(plan.total_tokens for plan in driver.executor.plans)
        assert stats.scheduled_tokens_total == computed == 4 + 39 + 17 + 3 * 13 + stats.recomputed_tokens_total
        assert all(len(plan.block_copies) == len(plan.replaced_blocks) for plan in driver.executor.plans)
        assert stats.copied_blocks_total == sum(len(plan.block_copies) for plan in driver.executor.plans)
    assert min(taken_back[name] for name in ("samples", "copies", "new blocks")) > 0, taken_back


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


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize(("length", "params"), [(36, {"max_tokens": 1}), (35, {"max_tokens": 2}), (8, {"n": 2})])
def test_a_request_that_fills_the_pool_to_the_last_slot_runs(
    length: int, params: dict[str, int], queue_depth: int
) -> None:
    """Its last token needs no slot, so it may not be asked for when the request starts (or it never would)."""
    num_blocks = 6 if "n" in params else 9
    driver = CoreDriver(make_config(num_blocks=num_blocks, max_num_batched_tokens=8, queue_depth=queue_depth))
    driver.add("full", prompt(length), temperature=1.0, **{"max_tokens": 9, **params})
    driver.run(max_steps=100)
    assert not driver.refused
    assert driver.core.stats().preemptions_total == 0, "no step computes a token beyond the last"
    alone = generate_alone(prompt(length), temperature=1.0, **{"max_tokens": 9, **params})
    assert [driver.tokens[key] for key in sorted(driver.tokens)] == alone


@pytest.mark.parametrize(("length", "starts"), [(387, True), (388, False)])
def test_a_request_beside_others_starts_only_if_one_percent_stays_free(length: int, starts: bool) -> None:
    driver = CoreDriver(make_config(num_blocks=200, max_num_batched_tokens=1000, enable_prefix_caching=False))
    driver.add("first", prompt(400), max_tokens=3)
    driver.step()
    driver.add("second", prompt(length, start=5), max_tokens=2)
    driver.step()  # the first takes its 101st block: 99 are left, of which 2 are kept
    assert driver.core.stats().num_running == 1 + starts
    driver.run()


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


def test_a_request_whose_leader_was_aborted_keeps_its_place() -> None:
    """It starts again, but it arrived first: later arrivals are preempted for it, and wait behind it."""
    config = make_config(num_blocks=18, max_num_batched_tokens=16, max_prefill_chunk=10, enable_prefix_caching=False)
    driver = CoreDriver(config, record=True)
    driver.add("first", prompt(24), n=3, temperature=1.0, max_tokens=16)
    driver.add("second", prompt(6, start=9), max_tokens=40)
    driver.step()
    driver.abort("first", 0)
    driver.scheduler.check()
    driver.step()
    assert [sequence.request.request_id for sequence in driver.scheduler._running.sequences] == ["first", "second"]
    driver.run()
    assert driver.core.stats().preemptions_total == 1
    assert [name for name, _ in driver.finished] == ["first", "first", "second"]
    alone = generate_alone(prompt(24), n=3, temperature=1.0, max_tokens=16)
    assert [driver.tokens["first", i] for i in (1, 2)] == alone[1:]


def test_the_queue_keeps_the_order_of_arrival() -> None:
    requests = []
    for seq_id in range(4):
        source = EngineRequest(
            request_id=f"r{seq_id}", prompt_token_ids=[1], params=SamplingParams(), max_tokens=1, seed=0
        )
        request = Request(source, 0.0, arrival_number=seq_id)
        request.sequences = [Sequence(seq_id, 0, request, SequenceSampling(request.params, 0, [], []))]
        requests.append(request)
    queue = RequestQueue()
    queue.push(requests[3])
    for number in (2, 0, 1):
        queue.put_back(requests[number])
    assert list(queue) == requests
    queue.remove(requests[1])
    queue.remove(requests[1])
    assert list(queue) == [requests[0], *requests[2:]]
    assert len(queue) == 3
    assert queue.num_returned == 2


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_prompt_logprobs_come_from_the_next_leader_when_the_first_is_aborted(queue_depth: int) -> None:
    driver = CoreDriver(make_config(max_num_batched_tokens=8, queue_depth=queue_depth))
    driver.add("r", prompt(30), n=2, prompt_logprobs=0, max_tokens=2)
    driver.step()
    reported = driver.prompt_logprob_positions["r"]
    driver.abort("r", 0)
    updates = []
    original = driver.core.scheduler.update
    driver.core.scheduler.update = lambda *args, **options: updates.extend(found := original(*args, **options)) or found  # type: ignore[method-assign]
    driver.run()
    assert {update.index for update in updates} == {1}, "nothing more is said of the completion that was aborted"
    assert reported == list(range(1, 30))


def test_gauges_count_requests_and_totals_count_what_was_handed_out() -> None:
    driver = CoreDriver(make_config(max_num_seqs=4, queue_depth=2))
    driver.add("trio", prompt(5), n=3, temperature=1.0, max_tokens=4)
    driver.add("one", prompt(5, start=3), max_tokens=4)
    driver.add("waits", prompt(5, start=6), max_tokens=4)
    driver.step()
    stats = driver.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preempted) == (2, 1, 0)
    assert stats.generation_tokens_total == 4
    driver.abort("trio", 1)
    driver.step()
    assert driver.core.stats().generation_tokens_total == 7, "the token that came too late is not counted"
    driver.run()
    stats = driver.core.stats()
    assert stats.generation_tokens_total == sum(map(len, driver.tokens.values())) == 1 + 4 * 4
    assert stats.prompt_tokens_total == 15
    assert stats.finished_requests_total == 3


def test_computing_a_shared_prompt_again_counts_once() -> None:
    driver = CoreDriver(make_config(num_blocks=24, max_num_seqs=6, enable_prefix_caching=False), record=True)
    driver.add("first", prompt(12), max_tokens=40)
    driver.add("pair", prompt(9, start=4), n=3, temperature=1.0, max_tokens=24)
    driver.run()
    stats = driver.core.stats()
    assert stats.preemptions_total > 0
    useful = 12 + 39 + 9 + 3 * 23
    assert stats.scheduled_tokens_total == useful + stats.recomputed_tokens_total


def test_a_long_queue_is_not_walked_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    original = RequestQueue.__iter__
    monkeypatch.setattr(RequestQueue, "__iter__", lambda self: (looked_at.append(r) or r for r in original(self)))
    driver = CoreDriver(make_config(max_num_seqs=1))
    for number in range(50):
        driver.add(f"r{number}", prompt(3), max_tokens=2)
    driver.step()
    assert driver.core.stats().num_waiting == 49
    assert len(looked_at) <= 2


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
