"""Long prompts on the wire: one piece in a turn, and what passes them meanwhile."""

from __future__ import annotations

import msgspec
import pytest

from quire.engine import long_prompts
from quire.engine.long_prompts import AddLongRequest, Arrivals, encode_message
from quire.engine.messages import Abort, AddRequest, Call, ClientMessage
from tests.engine.driving import add

SHORT, LONG, SECOND = add("short"), add("long", num_prompt_tokens=17), add("second", num_prompt_tokens=9)


def sent(message: ClientMessage) -> ClientMessage | AddLongRequest:
    """A message as it arrives."""
    encoded = encode_message(msgspec.msgpack.Encoder(), message)
    return msgspec.msgpack.decode(encoded, type=ClientMessage | AddLongRequest)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def pieces_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompts, "PIECE_TOKENS", 8)


def test_a_turn_decodes_one_piece_and_others_pass() -> None:
    arrivals = Arrivals()
    assert arrivals.turn([sent(LONG), sent(SECOND), sent(SHORT)]) == [SHORT]
    assert arrivals
    assert arrivals.turn([Call(1, "check")]) == [Call(1, "check")]
    assert [arrivals.turn([]) for _ in range(3)] == [[LONG], [], [SECOND]]
    assert not arrivals
    assert arrivals.turn([]) == []


def test_an_abort_leaves_nothing_of_the_request() -> None:
    arrivals = Arrivals()
    assert arrivals.turn([sent(LONG)]) == []
    assert arrivals.turn([Abort("long"), Abort("other")]) == [Abort("other")]
    assert not arrivals


def test_the_end_of_one_sequence_follows_the_request() -> None:
    arrivals = Arrivals()
    turns = [arrivals.turn([sent(LONG)]), arrivals.turn([Abort("long", 1)]), arrivals.turn([Abort("long", 0)])]
    assert turns == [[], [], [LONG, Abort("long", 1), Abort("long", 0)]]


def test_all_of_it_at_once() -> None:
    message = sent(LONG)
    assert isinstance(message, AddLongRequest)
    assert message.whole() == LONG
    assert isinstance(sent(add("eight", num_prompt_tokens=8)), AddRequest)
