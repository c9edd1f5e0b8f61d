"""How many drafts a sequence computes: by what became of those before."""

from __future__ import annotations

import random

import pytest

from quire.decoding import draft_numbers
from quire.decoding.draft_numbers import LEAST_CHANCE, LEAST_CHANCE_OF_MANY, RARE, DraftRecord, StepTimes


@pytest.fixture(autouse=True)
def times_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_numbers, "LEAST_SECONDS", 0.0)


def run(record: DraftRecord, chance: float, steps: int, most: int = 8) -> tuple[int, int]:
    """Drafts, and accepted ones, of as many steps, where each draft is right with this probability."""
    draw, num_drafts, num_accepted = random.Random(1), 0, 0
    for _ in range(steps):
        if record.wants_trial():
            count = min(record.limit(1), most)
            accepted = next((place for place in range(count) if draw.random() >= chance), count)
            record.note(count, accepted)
            num_drafts, num_accepted = num_drafts + count, num_accepted + accepted
    return num_drafts, num_accepted


def test_drafts_that_are_always_right_become_as_many_as_there_may_be() -> None:
    record = DraftRecord(8)
    run(record, 1.0, 10)
    assert run(record, 1.0, 5) == (40, 40)


def test_drafts_that_are_always_wrong_become_rare() -> None:
    record = DraftRecord(8)
    run(record, 0.0, 20)
    assert run(record, 0.0, 10 * RARE) == (10, 0)


def test_among_many_sequences_trials_are_rarer() -> None:
    """A step of many sequences waits for arithmetic, where a wrong draft costs as much as a token."""
    record = DraftRecord(8)
    run(record, 0.0, 20)
    trials = [sum(record.wants_trial(number) for _ in range(16 * RARE)) for number in (1, 7, 16, 64)]
    assert trials == [16, 16, 4, 1]
    record = DraftRecord(8, 0.25)
    assert [record.wants_trial(number) for number in (1, 7, 8)] == [True, True, False]


def test_a_text_that_begins_to_repeat_itself_is_found_out() -> None:
    record = DraftRecord(8)
    run(record, 0.0, 50)
    run(record, 1.0, 4 * RARE)
    assert run(record, 1.0, 1) == (8, 8)


def test_the_number_lies_between() -> None:
    """A draft of two is right: one is accepted in the mean, however many there are."""
    record = DraftRecord(8)
    num_drafts, num_accepted = run(record, 0.5, 1000)
    assert 0.25 < num_accepted / num_drafts < 0.5
    assert 1.5 < num_drafts / 1000 < 4


def times_of(arithmetic: float, chance: float, streams: int, steps: int = 2000) -> tuple[list[int], float]:
    """Numbers of drafts of a sequence's last steps, where a step takes 10 ms and each row behind the eighth as much as
    `arithmetic` says; and tokens a second over those without drafts, of the last half."""
    draw, times, seconds, tokens = random.Random(2), StepTimes(), 0.0, 0
    records = [DraftRecord(8, times=times) for _ in range(streams)]
    last = [0] * streams
    numbers = []
    for step in range(steps):
        took = (10 + arithmetic * max(0, streams + sum(last) - 8)) / 1000
        if step >= steps // 2:
            seconds += took
            tokens += streams
            numbers.append(last[0])
        for record, count in zip(records, last, strict=True):
            if count:
                accepted = next((place for place in range(count) if draw.random() >= chance), count)
                record.note(count, accepted)
                tokens += accepted if step >= steps // 2 else 0
        times.note(streams, sum(last), took)
        times.set_price(streams, [record.chance for record in records], 8)
        is_wanted = not times.wants_plain(streams)
        last = [record.limit(streams) if is_wanted and record.wants_trial(streams) else 0 for record in records]
    plain = (10 + arithmetic * max(0, streams - 8)) / 1000
    return numbers, tokens / seconds * plain / streams


@pytest.mark.parametrize("chance", [0.1, 0.3, 0.7, 0.9])
@pytest.mark.parametrize("streams", [1, 4, 16])
@pytest.mark.parametrize("arithmetic", [0.0, 1.25])
def test_the_number_brings_most_tokens_a_second(arithmetic: float, streams: int, chance: float) -> None:
    _, gain = times_of(arithmetic, chance, streams)
    best = 0.0
    for number in range(9):
        expected = sum(chance**place for place in range(number + 1))
        over = [10 + arithmetic * max(0, rows - 8) for rows in (streams, streams * (1 + number))]
        best = max(best, expected * over[0] / over[1])
    assert gain > 0.93 * best


def test_drafts_that_became_cheap_are_tried_again() -> None:
    """The streams around have ended: rows cost nothing any more."""
    dear, times = StepTimes(), [0.01, 0.01, 0.01]
    for seconds in times:
        dear.note(16, 0, seconds)
        dear.note(16, 16, 2 * seconds)
    dear.set_price(16, [0.9] * 16, 8)
    assert dear.price(16) > 0.9
    record = DraftRecord(8, 0.9, dear)
    assert sum(record.wants_trial(16) for _ in range(4 * RARE)) == 1
    for _ in range(30):
        dear.note(16, 0, 0.01)
        dear.note(16, 16, 0.01)
        dear.set_price(16, [0.9] * 16, 8)
    assert dear.price(16) < 0.5
    assert record.wants_trial(16)


def test_a_clock_that_stands_still_leaves_the_price_to_counts() -> None:
    times = StepTimes()
    for drafts in (0, 4) * 5:
        times.note(1, drafts, 0.0)
        times.set_price(1, [0.5], 8)
    assert (times.price(1), times.price(8)) == (LEAST_CHANCE, LEAST_CHANCE_OF_MANY)
    assert not times.wants_plain(1)
