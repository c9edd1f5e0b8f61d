"""The budget of thoughts: whatever a model samples, and wherever it is interrupted, the thoughts end in time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.decoding.masks import ConstraintSpec
from quire.decoding.thinking_budget import BudgetConstraint
from quire.errors import UserError
from quire.sampling_params import SamplingParams, ThinkingBudget

START, END = [1, 2], [3, 4]
VOCAB_SIZE = 70


def allowed(mask: bytes | None) -> list[int]:
    if mask is None:
        return list(range(VOCAB_SIZE))
    assert len(mask) == 12
    return [int(each) for each in np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))]


def longest_thought(token_ids: list[int], is_open: bool) -> int:
    """Most tokens between a start and the next end, by reading the sequence with both at hand."""
    longest = count = 0
    inside = is_open
    for place in range(len(token_ids)):
        if inside:
            count += 1
            if token_ids[max(place - 1, 0) : place + 1] == END:
                longest, inside, count = max(longest, count - len(END)), False, 0
        elif token_ids[max(place - 1, 0) : place + 1] == START:
            inside, count = True, 0
    return max(longest, count)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=40),
    st.integers(0, 6),
    st.booleans(),
    st.integers(0, 40),
)
def test_thoughts_end_in_time(wanted: list[int], budget: int, is_open: bool, cut: int) -> None:
    """A model that samples `wanted` where it may; its sequence goes on in a new engine behind `cut` tokens."""
    constraint = BudgetConstraint(None, ThinkingBudget(budget, START, END, is_open), VOCAB_SIZE)
    matcher = constraint.matcher(ConstraintSpec(), [])
    token_ids: list[int] = []
    for number, token_id in enumerate(wanted):
        if number == cut:
            matcher = constraint.matcher(ConstraintSpec(), token_ids)
        choices = allowed(matcher.mask())
        assert len(choices) in (1, VOCAB_SIZE)
        token_ids.append(token_id if token_id in choices else choices[0])
        assert matcher.accept(token_ids[-1])
    # Behind the budget come the tokens of the end, and no other.
    assert longest_thought(token_ids, is_open) <= budget + len(END)


def test_copies_go_their_own_ways() -> None:
    constraint = BudgetConstraint(None, ThinkingBudget(0, START, END, is_open=False), VOCAB_SIZE)
    first = constraint.matcher(ConstraintSpec(), START[:1])
    second = first.copy()
    assert first.accept(9)
    assert second.accept(START[1])
    assert (first.forced_token(), second.forced_token()) == (None, END[0])


def test_what_it_does_not_go_with() -> None:
    with pytest.raises(UserError, match="at least -1"):
        SamplingParams(thinking_token_budget=-2)
    assert not SamplingParams(thinking_token_budget=-1).has_thinking_budget
