"""Requests that move from one engine to another: their callers see nothing of it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from quire.config.options import EngineOptions
from quire.engine.inprocess_client import InProcessClient
from quire.engine.messages import Abort, AddRequest
from quire.errors import UserError
from tests.engine.driving import add, call, stats
from tests.engine.fleets import Gated, note, owners, wait_for
from tests.engine.requests import FAKE, KINDS, Heard, hear, hear_rest, request, told


@pytest.fixture
def gated(options: EngineOptions) -> Iterator[Gated]:
    gated = Gated(options)
    yield gated
    gated.open()
    gated.fleet.shutdown()


MOVABLE = [kind for kind in KINDS if not kind.get("use_beam_search")]


@hypothesis_settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=6), st.integers(1, 2))
def test_requests_move_at_any_step_with_equal_tokens(
    small: EngineOptions, moves: list[tuple[int, int]], queue_depth: int
) -> None:
    """moves: steps that the engines make before a move, and the request that moves."""
    requests = [request(number, **MOVABLE[number % len(MOVABLE)]) for number in range(5)]
    alone = InProcessClient(small, executor=FAKE)
    expected = told(hear(alone, requests)[0])
    alone.shutdown()
    gated = Gated(msgspec.structs.replace(small, queue_depth=queue_depth))
    fleet, heard = gated.fleet, Heard()
    fleet.send(*map(AddRequest, requests))
    for num_steps, number in moves:
        for engine in (gated[0], gated[1]):
            engine.let(num_steps)
        wait_for(lambda: gated[0].is_waiting and gated[1].is_waiting)
        while (outputs := fleet.receive(0)) is not None:
            note(outputs.updates, heard)
        if f"r{number}" in fleet._entries:
            fleet.move(f"r{number}", 1 - owners(fleet, f"r{number}")[0])
    gated.open()
    assert not hear_rest(fleet, requests, heard)
    assert told(heard) == expected
    assert stats(fleet).num_used_blocks == 0
    assert call(fleet, "check").error is None
    fleet.shutdown()


def test_a_request_leaves_one_engine_and_goes_on_at_the_other(gated: Gated) -> None:
    gated.fleet.send(add("a", max_tokens=20))
    heard: Heard = {}
    gated.step(0, heard, 5)
    gated.fleet.move("a", 1)
    gated.fleet.move("a", 1)
    assert len(gated.fleet._calls._open) == 1, "a later answer would move it again, when it may be back"
    gated.fleet.move("b", 1)
    gated[0].let(1)
    wait_for(lambda: owners(gated.fleet, "a") == [1])
    assert gated[1].request_ids == {"a"}
    while heard["a", 0][-1].finish_reason is None:
        gated.step(1, heard)
    tokens = [token_id for update in heard["a", 0] for token_id in update.new_token_ids]
    assert len(tokens) == 20
    gated.open()
    assert stats(gated.fleet).num_used_blocks == 0


def test_a_death_before_a_request_has_left_moves_it_all_the_same(gated: Gated) -> None:
    gated.fleet.send(add("a", max_tokens=20))
    heard: Heard = {}
    gated.step(0, heard, 5)
    gated.fleet.move("a", 1)
    gated[0].kill()
    wait_for(lambda: owners(gated.fleet, "a") == [1])
    while heard["a", 0][-1].finish_reason is None:
        gated.step(1, heard)
    assert sum(len(update.new_token_ids) for update in heard["a", 0]) == 20


@pytest.mark.parametrize("index", [None, 0])
def test_an_abort_while_a_request_moves(gated: Gated, index: int | None) -> None:
    gated.fleet.send(add("a", max_tokens=20))
    gated.step(0, {}, 5)
    gated.fleet.move("a", 1)
    gated.fleet.send(Abort("a", index))
    gated.open()
    assert stats(gated.fleet).num_used_blocks == 0
    assert gated.fleet._entries == {}
    assert gated[1].request_ids == set()


def test_what_does_not_move(gated: Gated) -> None:
    beams = request(4, **KINDS[4])
    prefix = msgspec.structs.replace(request(3, max_tokens=1), register_prefix=True)
    gated.fleet.send(AddRequest(beams), AddRequest(prefix))
    with pytest.raises(UserError, match="a beam search does not move from one engine to another"):
        gated.fleet.move("r4", 1)
    with pytest.raises(UserError, match="a prefix does not move from one engine to another"):
        gated.fleet.move("r3", 0)
