"""Placements of experts on ranks, and the moves between them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from quire.parallel.expert_placement import (
    ELSEWHERE,
    Placement,
    balanced,
    busiest,
    first_placement,
    moves_between,
    num_copies,
    places_of,
)


def check(placement: Placement, num_experts: int) -> None:
    """Every expert is somewhere, and nowhere twice on a rank."""
    assert all(num_copies(placement, num_experts))
    assert all(len(set(own)) == len(own) for own in placement)


@pytest.mark.parametrize(
    ("strategy", "sizes", "expected"),
    [
        ("linear", (8, 2, 0), ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("linear", (7, 3, 0), ((0, 1, 2), (3, 4), (5, 6))),
        ("round_robin", (7, 3, 0), ((0, 3, 6), (1, 4), (2, 5))),
        ("linear", (4, 2, 2), ((0, 1, 2), (2, 3, 0))),
        ("linear", (4, 2, 1), ((0, 1, 2), (2, 3))),
        ("round_robin", (4, 2, 4), ((0, 2, 1, 3), (1, 3, 0, 2))),
    ],
)
def test_before_any_load(strategy: str, sizes: tuple[int, int, int], expected: Placement) -> None:
    assert first_placement(*sizes, strategy) == expected


def test_places() -> None:
    placement = ((0, 1, 2), (3, 2, 0))
    assert places_of(placement, 0, 4) == [(0, 2, 0), (1, 1, 0), (2, 2, 0), (ELSEWHERE, 1, 0)]
    assert places_of(placement, 1, 4) == [(2, 2, 1), (ELSEWHERE, 1, 0), (1, 2, 1), (0, 1, 0)]


def test_copies_go_to_the_busiest_experts() -> None:
    first = first_placement(4, 2, 2, "linear")
    load = [10, 10, 10, 90]
    found = balanced(load, first)
    assert num_copies(found, 4)[3] == 2
    assert busiest(load, found) == 60 < busiest(load, first) == 100
    assert busiest([9, 1, 1, 9], balanced([9, 1, 1, 9], ((0, 3), (1, 2)))) == 10


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_moves_lead_from_any_placement_to_a_balanced_one(data: st.DataObject) -> None:
    """One after the other, with every expert on some rank all the time."""
    num_ranks = data.draw(st.integers(1, 5))
    num_experts = data.draw(st.integers(num_ranks, 12))
    redundant = data.draw(st.integers(0, min(12, num_experts * (num_ranks - 1))))
    placement = first_placement(
        num_experts, num_ranks, redundant, data.draw(st.sampled_from(["linear", "round_robin"]))
    )
    sizes = [len(own) for own in placement]
    assert sum(sizes) == num_experts + redundant
    assert max(sizes) - min(sizes) <= 1
    check(placement, num_experts)
    for _ in range(2):
        load = data.draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
        wanted = balanced(load, placement)
        check(wanted, num_experts)
        assert [len(own) for own in wanted] == sizes
        for move in moves_between(placement, wanted):
            placement = move.applied(placement)
            check(placement, num_experts)
        assert [set(own) for own in placement] == [set(own) for own in wanted]
