"""How many drafts a sequence computes: by what became of those before."""

from __future__ import annotations

import random

from quire.decoding.draft_numbers import RARE, DraftRecord


def run(record: DraftRecord, chance: float, steps: int, most: int = 8) -> tuple[int, int]:
    """Drafts, and accepted ones, of as many steps, where each draft is right with this probability."""
    draw, num_drafts, num_accepted = random.Random(1), 0, 0
    for _ in range(steps):
        if record.wants_trial():
            count = min(record.limit, most)
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
    record.mean = 0.3
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
