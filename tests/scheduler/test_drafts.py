"""Drafts: a step yields as many tokens as the workers accept, and the text is the one without drafts."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize

from quire.decoding.drafts import Drafts, WorkerDrafts, count_drafts, note_found_drafts
from quire.decoding.sequence import Sequence
from quire.kv_cache.stats import EngineStats
from quire.request import FinishReason
from quire.step import StepPlan, StepResult
from tests.fakes.core import CoreDriver, generate_alone, make_config
from tests.fakes.drafts import RandomDrafts, make_drafting_driver
from tests.fakes.traffic import DraftingEpisode, run_traffic
from tests.machines import run_machine
from tests.scheduler.test_state_machine import ENGINES, EngineMachine, engine_config


class OwnDrafts:
    """The scheduler proposes tokens of a given text, when it knows all before them; else the worker does."""

    asks_always = True

    def __init__(self, text: list[int], max_drafts: int) -> None:
        self.text = text
        self.max_drafts = max_drafts

    def propose(self, sequence: Sequence, limit: int, batch_size: int) -> Drafts:
        if sequence.num_pending_tokens:
            return Drafts(limit)
        place = sequence.num_output_tokens
        found = self.text[place : place + limit]
        return Drafts(len(found), found)

    def note_step(self, samples: list[Sequence], plan: StepPlan, result: StepResult, seconds: float) -> None:
        note_found_drafts(samples, result)


def make_driver(drafter: Any, **options: Any) -> CoreDriver:
    return make_drafting_driver(make_config(**options), drafter, record=True)


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 90 + 1 for i in range(length)]


def test_right_drafts_are_as_many_tokens_more() -> None:
    text = generate_alone(prompt(9), max_tokens=13)[0]
    driver = make_driver(OwnDrafts(text, 3))
    driver.add("r", prompt(9), max_tokens=13, logprobs=2)
    driver.run()
    assert driver.tokens["r", 0] == text
    assert [entry.token_ids[0] for entry in driver.logprobs["r", 0]] == text
    assert [plan.num_tokens for plan in driver.executor.plans] == [[9], [4], [4], [4]], "one, and three times four"
    stats = driver.core.stats()
    assert (stats.generation_tokens_total, stats.steps_total) == (13, 4)
    assert driver.executor.num_accepted_drafts == driver.executor.num_drafts == 9


@pytest.mark.parametrize("queue_depth", [1, 2, 3, 4])
def test_wrong_drafts_cost_nothing_but_their_computation(queue_depth: int) -> None:
    text = generate_alone(prompt(9), max_tokens=20)[0]
    driver = make_driver(OwnDrafts([96 - token for token in text], 5), queue_depth=queue_depth, block_size=2)
    driver.executor.propose_drafts = lambda _seq_id, right, _count: [96 - token for token in right]
    driver.add("r", prompt(9), max_tokens=20)
    while driver.core.has_work:
        driver.step()
        driver.scheduler.check()
        for sequence in driver.scheduler._running.sequences:
            blocks = sequence.blocks
            assert blocks.capacity - 2 < sequence.num_computed_tokens <= blocks.capacity, "blocks of rejected drafts"
    assert driver.tokens["r", 0] == text
    assert driver.executor.num_drafts > 0 == driver.executor.num_accepted_drafts
    assert any(plan.trimmed_tables for plan in driver.executor.plans)
    driver.assert_all_free()


@pytest.mark.parametrize("queue_depth", [1, 2, 3, 4])
def test_an_end_token_among_accepted_drafts_cuts_the_rest(queue_depth: int) -> None:
    text = generate_alone(prompt(9), max_tokens=20)[0]
    stop = next(token for place, token in enumerate(text) if place >= 6 and token not in text[:place])
    driver = make_driver(OwnDrafts(text, 4), queue_depth=queue_depth)
    driver.executor.propose_drafts = lambda _seq_id, right, _count: right
    driver.add("r", prompt(9), max_tokens=20, stop_token_ids=[stop])
    driver.run()
    assert driver.tokens["r", 0] == text[: text.index(stop) + 1]
    assert driver.finished["r", 0] is FinishReason.STOP
    assert driver.core.stats().generation_tokens_total == text.index(stop) + 1


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_is_the_last(max_tokens: int) -> None:
    text = generate_alone(prompt(9), max_tokens=20)[0]
    driver = make_driver(OwnDrafts(text, 4), queue_depth=2)
    driver.executor.propose_drafts = lambda _seq_id, right, _count: right
    driver.add("r", prompt(9), max_tokens=max_tokens)
    driver.run()
    assert driver.tokens["r", 0] == text[:max_tokens]
    assert driver.finished["r", 0] is FinishReason.LENGTH


def test_the_workers_learn_whose_texts_a_sequence_may_draw_on() -> None:
    """Texts are shared between requests of equal clients and cache salts; a preempted one keeps its own."""
    scopes = set()
    for number, (client, salt) in enumerate((("a", ""), ("", "a"), ("a", "b"), ("", ""))):
        driver = make_driver(WorkerDrafts(3), num_blocks=6, block_size=2)
        driver.add("first", prompt(4), max_tokens=6, salt=salt, client=client)
        driver.add(f"r{number}", prompt(4, start=5), max_tokens=6, salt=salt, client=client, prediction=[4, 5])
        driver.run()
        new = [each for plan in driver.executor.plans for each in plan.new_sequences]
        assert driver.core.stats().preemptions_total
        assert {tuple(each.prediction) for each in new} == {(), (4, 5)}
        (scope,) = {each.text_scope for each in new}
        scopes.add(scope)
    assert len(scopes) == 4


def test_accepted_drafts_are_cached() -> None:
    """A later prompt that continues the text hits all of it but the last token."""
    text = generate_alone(prompt(9), max_tokens=20)[0]
    driver = make_driver(OwnDrafts(text, 6), block_size=4)
    driver.add("r", prompt(9), max_tokens=20)
    driver.run()
    driver.add("again", [*prompt(9), *text, 5], max_tokens=1)
    driver.run()
    assert driver.core.stats().prefix_cache_hits_total == 28


def test_drafts_are_dropped_when_blocks_run_out() -> None:
    """Drafts are dropped before a request is preempted for them."""
    text = generate_alone(prompt(8), max_tokens=8)[0]
    driver = make_driver(OwnDrafts(text, 6), num_blocks=8, block_size=2)
    driver.add("r", prompt(8), max_tokens=8)
    driver.run()
    assert driver.tokens["r", 0] == text
    driver.add("a", prompt(5, start=3), max_tokens=3)
    driver.add("b", prompt(5, start=7), max_tokens=3)
    driver.run()
    assert driver.core.stats().preemptions_total == 0


@pytest.mark.parametrize("queue_depth", [1, 2, 3, 4])
@pytest.mark.parametrize("windows", [(None, None), (5, 5), (None, 7)])
def test_parallel_samples_with_drafts(queue_depth: int, windows: tuple[int | None, ...]) -> None:
    drafter = RandomDrafts(queue_depth, 5)
    driver = make_driver(drafter, queue_depth=queue_depth, windows=windows, block_size=2, num_blocks=200)
    driver.add("r", prompt(11), n=3, temperature=1.0, max_tokens=25)
    driver.run()
    expected = generate_alone(prompt(11), n=3, temperature=1.0, max_tokens=25)
    assert [driver.tokens["r", index] for index in range(3)] == expected
    assert 0 < driver.executor.num_accepted_drafts < driver.executor.num_drafts


def test_random_traffic_with_drafts() -> None:
    """Everything that can cross, with one to four plans in flight: all texts are those of lone runs without drafts."""
    totals = run_traffic(1, 3000, DraftingEpisode)
    assert totals["queue_depth_4"] > 0
    assert totals["drafts"] > totals["accepted_drafts"] > 100
    assert totals["trimmed_tables"] > 25
    for name in ("preemptions_total", "prefix_cache_hits_total", "evictions_total", "aborts", "swap_preemptions_total"):
        assert totals[name] > 10, name


class DraftingMachine(EngineMachine):
    """EngineMachine with drafts and one to four plans in flight."""

    totals: ClassVar[Counter[str]] = Counter()

    @initialize(
        **{**ENGINES, "max_prefill_chunk": st.sampled_from([None, None, 5])},
        enable_prefix_caching=st.booleans(),
        max_drafts=st.integers(1, 6),
        seed=st.integers(0, 1000),
    )
    def start(self, max_drafts: int, seed: int, **options: Any) -> None:
        self.drive(make_drafting_driver(engine_config(**options), RandomDrafts(seed, max_drafts)), seed % 3)

    def take_stock(self) -> None:
        super().take_stock()
        self.totals["accepted drafts"] += self.driver.executor.num_accepted_drafts


def test_random_schedules_with_drafts() -> None:
    DraftingMachine.totals.clear()
    run_machine(DraftingMachine, examples=12, steps=80)
    totals = DraftingMachine.totals
    assert totals["steps_total"] > 300
    assert totals["accepted drafts"] > 0


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize(
    ("drafter", "constraint"),
    [(WorkerDrafts(3), None), (RandomDrafts(3, 3), None), (WorkerDrafts(3), "5")],
    ids=["without drafts", "with drafts", "under a constraint"],
)
def test_a_discarded_sample_is_computed_again(queue_depth: int, drafter: Any, constraint: str | None) -> None:
    """The workers may return no token at all, and go on from the last known one. A matcher is not asked about it."""
    driver = make_driver(drafter, queue_depth=queue_depth, block_size=2)
    executor, draw, num_discarded = driver.executor, random.Random(5), 0
    take_samples = executor._sample

    def discard(plan: StepPlan, result: StepResult) -> None:
        nonlocal num_discarded
        take_samples(plan, result)
        for index, seq_id in enumerate(plan.sample_seq_ids):
            row, count = executor._rows[seq_id], len(result.token_ids[index])
            if len(row.token_ids) - count > row.num_prompt_tokens and draw.random() < 0.3:
                del row.token_ids[-count:]
                row.num_computed = len(row.token_ids) - 1
                del row.chain[row.num_computed :]
                row.rejected.append((executor.num_steps, count))
                result.token_ids[index] = []
                result.logprobs.pop(index, None)
                num_discarded += 1

    executor._sample = discard  # type: ignore[method-assign]
    driver.ledger.has_drafts = True  # a plan does not say which samples are discarded
    driver.masks.tells_forced = False  # what a mask forces is known before its step samples it
    for name in "ab":
        driver.add(name, prompt(9 + ord(name)), max_tokens=20, logprobs=0, constraint=constraint)
    while driver.core.has_work:
        driver.step()
        driver.scheduler.check()
    for name in "ab":
        expected = generate_alone(prompt(9 + ord(name)), max_tokens=20, constraint=constraint)[0]
        assert driver.tokens[name, 0] == expected
        assert [entry.token_ids[0] for entry in driver.logprobs[name, 0]] == driver.tokens[name, 0]
    assert num_discarded > 3
    driver.assert_all_free()


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_drafts_that_the_workers_find(queue_depth: int) -> None:
    """Steps are planned as without drafts until a result says that the workers have some."""
    driver = make_driver(WorkerDrafts(3), queue_depth=queue_depth)
    executor, take_samples = driver.executor, driver.executor._sample
    executor.propose_drafts = lambda _seq_id, right, _count: [*right[:-1], 96 - right[-1]]

    def find(plan: StepPlan, result: StepResult) -> None:
        take_samples(plan, result)
        result.found_drafts = {0: 2} if 20 < executor.num_steps <= 30 else {}

    executor._sample = find  # type: ignore[method-assign]
    driver.add("r", prompt(9), max_tokens=60)
    steady = []
    while driver.core.has_work:
        driver.step()
        driver.scheduler.check()
        steady.append(any(each.fast_path_until for each in driver.scheduler._running.sequences))
    assert driver.tokens["r", 0] == generate_alone(prompt(9), max_tokens=60)[0]
    with_drafts = [number for number, plan in enumerate(executor.plans) if plan.num_drafts]
    assert with_drafts == list(range(20 + queue_depth, 30 + queue_depth))
    assert executor.num_accepted_drafts == 10
    assert all(steady[3:20])
    assert steady[-5]


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize(("constraint", "end"), [("5", None), ("70", None), ("5", 17)], ids=["5", "70", "5 that ends"])
def test_drafts_under_a_constraint(queue_depth: int, constraint: str, end: int | None) -> None:
    """Some are wrong, some lie among forced tokens, and some behind the constraint's end, where a run is cut."""
    text = generate_alone(prompt(9), max_tokens=40, constraint=constraint)[0]
    driver = make_driver(WorkerDrafts(4), queue_depth=queue_depth, block_size=2)
    driver.masks.max_tokens = end
    executor, draw = driver.executor, random.Random(3)
    take_samples = executor._sample

    def find(plan: StepPlan, result: StepResult) -> None:
        take_samples(plan, result)
        place = len(executor._rows[plan.sample_seq_ids[0]].token_ids) - 9 if plan.sample_seq_ids else 0
        guesses = [token if draw.random() < 0.8 else (token + 1) % 97 for token in text[place : place + 4]]
        if place and guesses:
            result.found_drafts, result.draft_token_ids = {0: len(guesses)}, {0: guesses}

    executor._sample = find  # type: ignore[method-assign]
    driver.add("r", prompt(9), max_tokens=40, constraint=constraint)
    while driver.core.has_work:
        driver.step()
        driver.scheduler.check()
    assert driver.tokens["r", 0] == text[:end]
    assert driver.finished["r", 0] is (FinishReason.LENGTH if end is None else FinishReason.STOP)
    assert 0 < executor.num_accepted_drafts < executor.num_drafts
    driver.assert_all_free()


def drafts_of_steps(drafter: WorkerDrafts, guess: Any = lambda right: right, **requests: dict[str, Any]) -> Any:
    """The numbers of drafts of each request's steps, where the workers find as many as they may."""
    driver = make_driver(drafter)
    executor, take_samples = driver.executor, driver.executor._sample
    executor.propose_drafts = lambda _seq_id, right, _count: guess(right)

    def find(plan: StepPlan, result: StepResult) -> None:
        take_samples(plan, result)
        result.found_drafts = dict.fromkeys(range(len(plan.sample_seq_ids)), drafter.max_drafts)

    executor._sample = find  # type: ignore[method-assign]
    for number, (name, fields) in enumerate(requests.items()):
        driver.add(name, prompt(9, start=number), **fields)
    driver.run()
    for number, (name, fields) in enumerate(requests.items()):
        assert driver.tokens[name, 0] == generate_alone(prompt(9, start=number), **fields)[0]
    plans = [plan for plan in driver.executor.plans if plan.num_drafts]
    return [
        [count for plan in plans for each, count in zip(plan.seq_ids, plan.num_drafts, strict=True) if each == number]
        for number in range(len(requests))
    ]


def test_a_request_says_how_many_drafts_it_wants() -> None:
    some, none, all_, more = drafts_of_steps(
        WorkerDrafts(4, adapts=False),
        some={"max_tokens": 24, "num_speculative_tokens": 2},
        none={"max_tokens": 24, "num_speculative_tokens": 0},
        all={"max_tokens": 24},
        more={"max_tokens": 24, "num_speculative_tokens": 9},
    )
    assert (max(some), max(none), max(all_), max(more)) == (2, 0, 4, 4)


def test_the_number_by_running_sequences() -> None:
    """One has four drafts, two have three, and more have none."""
    drafter = WorkerDrafts(4, ((1, 4), (2, 3), (4, 0)), adapts=False)
    requests = {str(number): {"max_tokens": 16} for number in range(5)}
    for count, most in ((1, 4), (2, 3), (3, None), (5, None)):
        found = drafts_of_steps(drafter, **dict(list(requests.items())[:count]))
        assert [numbers[0] if numbers else None for numbers in found] == [most] * count


def test_wrong_drafts_become_few() -> None:
    [right] = drafts_of_steps(WorkerDrafts(4), a={"max_tokens": 60})
    [wrong] = drafts_of_steps(
        WorkerDrafts(4), lambda right: [(token + 1) % 97 for token in right], a={"max_tokens": 60}
    )
    assert right[:2] == [4, 4]
    assert wrong[:4] == [4, 2, 1, 1]
    assert wrong[-2:] == [1, 1]
    assert len(wrong) < 20


def test_drafts_are_counted() -> None:
    """Three steps: one draft and then others are right."""
    stats, plan = EngineStats(), StepPlan(0, [0, 1, 2], [9] * 3, [4, 1, 2], [0, 1, 2], [0, 1, 2], num_drafts=[3, 0, 1])
    for tokens in ([[1, 2], [3], [4]], [[1, 2, 3, 4], [5], [6, 7]], [[1], [2], [3]]):
        before = stats.accepted_drafts_by_position
        count_drafts(stats, plan, StepResult(0, tokens, num_drafts=4))
        assert stats.accepted_drafts_by_position is not before
    assert (stats.drafts_total, stats.draft_tokens_total, stats.accepted_draft_tokens_total) == (6, 12, 5)
    assert stats.accepted_drafts_by_position == [3, 1, 1]


def test_a_new_sequence_expects_what_those_before_it_had() -> None:
    drafter = WorkerDrafts(8)
    driver = CoreDriver(make_config())
    driver.add("a", [1, 2, 3], max_tokens=4)
    driver.step()
    (sequence,) = driver.scheduler._running.sequences
    sequence.num_found_drafts = 8
    assert drafter.propose(sequence, 8, 1).num_tokens == 4, "two of a trial are expected at first"
    for _ in range(100):
        assert sequence.draft_record is not None
        sequence.draft_record.note(1, 0)
        drafter.propose(sequence, 8, 1)
    sequence.draft_record = None
    assert drafter.propose(sequence, 8, 1).num_tokens == 1
    result = StepResult(1, [[3]], found_drafts={0: 8})
    wanted = []
    for _ in range(32):
        sequence.fast_path_until = 5
        note_found_drafts([sequence], result)
        wanted.append(sequence.num_found_drafts)
        assert (sequence.fast_path_until == 0) == (sequence.num_found_drafts == 8)
    assert wanted.count(8) == 2, "the others take the fast path"
