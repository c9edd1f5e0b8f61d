"""What processes in front of one engine tell each other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from quire.clock import VirtualClock
from quire.engine.request_part import Backlog
from quire.engine.shared_state import SharedState
from quire.utils.heartbeat import SILENCE_LIMIT
from quire.utils.shared_numbers import Numbers


def states(path: Path, clock: VirtualClock) -> list[SharedState]:
    """Of two processes and their parent."""
    parent = Numbers.create(path, 3)
    return [SharedState(numbers, clock) for numbers in (*(Numbers.open(path, 3, slot) for slot in (0, 1)), parent)]


def test_connections_go_to_the_fewest_and_not_to_a_process_that_is_stopped(tmp_path: Path) -> None:
    clock = VirtualClock()
    first, second, parent = states(tmp_path / "numbers", clock)
    for slot in (0, 1):
        parent.loads.take_slot(slot, 100 + slot)
    given = {0: 5, 1: 6}
    assert parent.loads.by_load(given) == [0, 1]
    second.loads.publish_connections(num_closed=4)
    assert parent.loads.by_load(given) == [1, 0], "5 are open, and 2"
    clock.advance(SILENCE_LIMIT)
    first.loads.publish_connections(num_closed=0)
    assert parent.loads.by_load(given) == [0, 1], "the second does not get on"
    clock.advance(SILENCE_LIMIT)
    assert parent.loads.by_load(given) == [1, 0], "neither does"
    assert parent.loads.by_load({0: 5}) == [0]
    assert second.loads.pids == [100, 101]


def test_loads_are_sums_and_end_with_their_process(tmp_path: Path) -> None:
    clock = VirtualClock(1000.0)
    first, second, parent = states(tmp_path / "numbers", clock)
    assert parent.loads.queue_seconds == math.inf
    backlog = Backlog(clock)
    for number in range(1000):  # 100 tokens a second for a long time
        backlog.add_request(str(number), 10)
        clock.advance(0.1)
        backlog.note_progress([str(number)])
    first.loads.publish(3, 2, 1, 400, backlog.progress)
    second.loads.publish(1, 1, 1, 100, backlog.progress)
    for state in (first, second, parent):
        assert (state.loads.num_unfinished, state.loads.num_pending, state.loads.num_tokens) == (4, 3, 500)
        assert state.loads.queue_seconds == pytest.approx(2.5, rel=0.02), "200 tokens a second"
    parent.loads.take_slot(0, 0)
    assert (second.loads.num_unfinished, second.loads.num_pending, second.loads.num_tokens) == (1, 1, 100)


def test_the_engines_state_is_one(tmp_path: Path) -> None:
    first, second, parent = (state.engine for state in states(tmp_path / "numbers", VirtualClock()))
    first.is_asleep, first.sleep_level, parent.silence = True, 2, 1.5
    assert (second.is_asleep, second.sleep_level, second.silence, second.pauses) == (True, 2, 1.5, False)
