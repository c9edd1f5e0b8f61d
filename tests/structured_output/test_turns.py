"""The order of rehearsals: clients in turns, lanes apart."""

from __future__ import annotations

from quire.structured_output.turns import RehearsalText, RehearsalTurns


def job(number: int, client: str, lane: int = 0) -> RehearsalText:
    return RehearsalText(number, "", client, 0.0, lane)


def taken(turns: RehearsalTurns, lanes: range) -> list[int]:
    found = []
    while (each := turns.take(lanes)) is not None:
        found.append(each.number)
    return found


def test_clients_take_turns() -> None:
    turns = RehearsalTurns(1)
    for number, client in enumerate("aaaabbc"):
        turns.add(job(number, client))
    assert taken(turns, range(1)) == [0, 4, 6, 1, 5, 2, 3]


def test_a_lane_is_taken_before_later_ones() -> None:
    turns = RehearsalTurns(3)
    for number, lane in enumerate((2, 1, 0, 2, 1)):
        turns.add(job(number, "a", lane))
    assert taken(turns, range(1)) == [2]
    assert taken(turns, range(1, 3)) == [1, 4, 0, 3]


def test_what_is_removed_is_not_taken() -> None:
    turns, jobs = RehearsalTurns(1), [job(number, "ab"[number % 2]) for number in range(4)]
    for each in jobs:
        turns.add(each)
    turns.remove(jobs[2])
    turns.remove(jobs[0])
    turns.remove(jobs[0])
    assert taken(turns, range(1)) == [1, 3]
