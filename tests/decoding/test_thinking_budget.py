"""The budget of thoughts: whatever a model samples, and wherever it is interrupted, the thoughts end in time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.decoding.masks import ConstraintSpec, mask_of
from quire.decoding.thinking_budget import BudgetConstraint
from quire.errors import UserError
from quire.sampling_params import SamplingParams, ThinkingBudget

START, END = [1, 2], [3, 4]
STARTS, ENDS = [START, [5]], [END, [6], [0, 8]]
VOCAB_SIZE = 70


def allowed(mask: bytes | None) -> list[int]:
    if mask is None:
        return list(range(VOCAB_SIZE))
    assert len(mask) == 12
    return [int(each) for each in np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))]


def ending(token_ids: list[int], marks: list[list[int]]) -> int:
    return next((len(mark) for mark in marks if token_ids[-len(mark) :] == mark), 0)


def longest_thought(token_ids: list[int], is_open: bool) -> int:
    """Most tokens between a start and the next end, by reading the sequence with both at hand."""
    longest = count = 0
    inside = is_open
    for place in range(1, len(token_ids) + 1):
        if inside:
            count += 1
            if length := ending(token_ids[:place], ENDS):
                longest, inside, count = max(longest, count - length), False, 0
        elif ending(token_ids[:place], STARTS):
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
    constraint = BudgetConstraint(None, ThinkingBudget(budget, STARTS, ENDS, is_open), VOCAB_SIZE)
    matcher = constraint.matcher(ConstraintSpec(), [])
    token_ids: list[int] = []
    for number, token_id in enumerate(wanted):
        if number == cut:
            matcher = constraint.matcher(ConstraintSpec(), token_ids)
        choices = allowed(matcher.mask())
        assert len(choices) in (1, VOCAB_SIZE)
        token_ids.append(token_id if token_id in choices else choices[0])
        matcher.advance(token_ids[-1:], 0)
        assert matcher.num_accepted == 1
    # Behind the budget come the tokens of the end, and no other.
    assert longest_thought(token_ids, is_open) <= budget + len(END)


def test_copies_go_their_own_ways() -> None:
    constraint = BudgetConstraint(None, ThinkingBudget(0, [START], [END], is_open=False), VOCAB_SIZE)
    first = constraint.matcher(ConstraintSpec(), START[:1])
    second = first.copy()
    first.advance([9], 10)
    second.advance([START[1]], 10)
    assert (first.forced, second.forced) == ([], END)


class Fixed:
    """A matcher around which a budget is: it accepts `accepts` and forces `forces` behind it."""

    is_ready, is_slow, error, is_finished, ends_in_text = True, False, None, False, False

    def __init__(self, accepts: list[int], forces: list[int]) -> None:
        self.accepts, self.forces, self.asked = accepts, forces, [[0, 0]][:0]
        self.num_accepted, self.forced = 0, list[int]()

    def matcher(self, spec: ConstraintSpec, token_ids: list[int]) -> Fixed:
        return self

    def advance(
        self, token_ids: list[int], num_forced: int, *, with_mask: bool = False, drafts: list[int] | tuple[()] = ()
    ) -> None:
        self.num_drafts = len(drafts)
        self.asked.append([*token_ids, num_forced])
        self.num_accepted = len([token for token in token_ids if token in self.accepts])
        self.forced = self.forces[:num_forced]

    def mask(self) -> bytes | None:
        return None

    def draft_masks(self) -> list[bytes]:
        return [b""] * (self.num_drafts - 1)


def test_tokens_that_the_inner_constraint_forces_count_as_thoughts_when_they_are_such() -> None:
    inner = Fixed(list(range(VOCAB_SIZE)), [*START, 3])
    matcher = BudgetConstraint(inner, ThinkingBudget(1, [START], [END], is_open=False), VOCAB_SIZE).matcher(  # type: ignore[arg-type]
        ConstraintSpec(), []
    )
    matcher.advance([5], 9)
    assert list(matcher.forced) == [*START, 3]
    assert allowed(matcher.mask()) == END[:1], "the mark opened thoughts, and one token used the budget up"
    matcher.advance(END[:1], 9)
    assert allowed(matcher.mask()) == END[1:]
    assert inner.asked[-1][:-1] == END[:1]


def test_no_inner_token_is_forced_within_thoughts() -> None:
    inner = Fixed(list(range(VOCAB_SIZE)), [3, 3])
    matcher = BudgetConstraint(inner, ThinkingBudget(4, [START], [END], is_open=True), VOCAB_SIZE).matcher(  # type: ignore[arg-type]
        ConstraintSpec(), []
    )
    matcher.advance([5], 9)
    assert inner.asked == [[5, 0]]


class Narrow(Fixed):
    """One that allows the tokens of `allows` only."""

    allows: list[int]

    def mask(self) -> bytes | None:
        return mask_of(self.allows, 12)

    def draft_masks(self) -> list[bytes]:
        return [mask_of(self.allows, 12)] * self.num_drafts


def test_a_mark_waits_until_the_inner_constraint_allows_it() -> None:
    """Between the tokens of a character, say, or where the constraint itself ends the thoughts."""
    inner = Narrow(list(range(VOCAB_SIZE)), [])
    constraint = BudgetConstraint(inner, ThinkingBudget(1, [START], [END], is_open=True), VOCAB_SIZE)  # type: ignore[arg-type]
    matcher = constraint.matcher(ConstraintSpec(), [])
    for token_id, allows, expected in (
        (5, [7, 8], [7, 8]),
        (7, [3, 8], END[:1]),
        (3, [4, 8], END[1:]),
        (4, [3, 8], [3, 8]),
    ):
        inner.allows = allows
        matcher.advance([token_id], 9, drafts=[allows[0]])
        assert allowed(matcher.mask()) == expected
        assert not matcher.forced
        assert matcher.error is None
    assert not matcher._is_thinking


@pytest.mark.parametrize("token_ids", [[5, 3, 8], [3, 4]])
def test_the_mark_is_not_tried_again(token_ids: list[int]) -> None:
    """Where the constraint took its beginning for other text, or wrote the mark itself as the budget ended."""
    inner = Narrow(list(range(VOCAB_SIZE)), [])
    constraint = BudgetConstraint(inner, ThinkingBudget(1, [START], [END], is_open=True), VOCAB_SIZE)  # type: ignore[arg-type]
    matcher = constraint.matcher(ConstraintSpec(), [])
    for token_id in token_ids:
        inner.allows = [8]
        matcher.advance([token_id], 9)
        assert allowed(matcher.mask()) == [8]
    inner.allows = [3, 8]
    matcher.advance([8], 9)
    assert allowed(matcher.mask()) == [3, 8]


def test_masks_behind_drafts_hold_the_mark_where_the_inner_constraint_allows_it() -> None:
    inner = Narrow(list(range(VOCAB_SIZE)), [])
    inner.allows = [3, 8]
    constraint = BudgetConstraint(inner, ThinkingBudget(2, [START], [END], is_open=True), VOCAB_SIZE)  # type: ignore[arg-type]
    matcher = constraint.matcher(ConstraintSpec(), [])
    matcher.advance([9], 0, drafts=[8, 3, 8, 3])
    assert [allowed(mask) for mask in matcher.draft_masks()] == [[3], [3, 8], [3, 8], [3, 8]]


def test_what_it_does_not_go_with() -> None:
    with pytest.raises(UserError, match="at least -1"):
        SamplingParams(thinking_token_budget=-2)
    assert not SamplingParams(thinking_token_budget=-1).has_thinking_budget


def test_the_budget_ends_within_drafts() -> None:
    """Two tokens of three are left: behind the second draft the mark alone may follow, which the drafts have."""
    constraint = BudgetConstraint(None, ThinkingBudget(3, [START], [END], is_open=True), VOCAB_SIZE)
    matcher = constraint.matcher(ConstraintSpec(), [])
    matcher.advance([9], 0, drafts=[8, 7, *END, 5])
    assert [allowed(mask or None) for mask in matcher.draft_masks()] == [allowed(None), [3], [4], *[allowed(None)] * 2]
    matcher.advance([8], 0, drafts=[7])
    assert [allowed(mask or None) for mask in matcher.draft_masks()] == [[3]], "the drafts before were not accepted"


def test_drafts_are_cut_where_the_inner_constraint_has_no_mask() -> None:
    inner = Fixed(list(range(VOCAB_SIZE)), [])
    matcher = BudgetConstraint(inner, ThinkingBudget(2, [START], [END], is_open=True), VOCAB_SIZE).matcher(  # type: ignore[arg-type]
        ConstraintSpec(), []
    )
    matcher.advance([9], 0, drafts=[8, *END])
    assert [allowed(mask or None) for mask in matcher.draft_masks()] == [[3], [4]]


def test_drafts_behind_the_mark_that_the_budget_forces() -> None:
    constraint = BudgetConstraint(None, ThinkingBudget(1, [START], [END], is_open=True), VOCAB_SIZE)
    for drafts, count in (([*END, 5, 6], 2), ([9, *END], 0)):
        matcher = constraint.matcher(ConstraintSpec(), [])
        matcher.advance([9], 10, drafts=drafts)
        assert matcher.forced == END
        assert matcher.draft_masks() == [b""] * count


def test_each_mark_of_a_format_counts() -> None:
    """A start other than the first is limited, and an end other than the first ends thoughts before the limit."""
    matcher = BudgetConstraint(None, ThinkingBudget(2, STARTS, ENDS, is_open=False), VOCAB_SIZE).matcher(
        ConstraintSpec(), [5, 9, 6, 9, 9, 9, 5, 9]
    )
    assert not matcher.forced
    matcher.advance([9], 10)
    assert matcher.forced == END
