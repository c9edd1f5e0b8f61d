"""Long prompts on the wire: one piece in a turn, and what passes them meanwhile."""

from __future__ import annotations

import msgspec
import pytest

from quire.config.options import EngineOptions
from quire.engine import long_prompts
from quire.engine.async_engine import AsyncLLM
from quire.engine.inprocess_client import InProcessClient
from quire.engine.long_prompts import ArrivingPrompts, encode_message, encode_pieces
from quire.engine.messages import Abort, AddRequest, Call
from tests.engine.driving import add, tokens_until_finished

SHORT, LONG, SECOND = add("short"), add("long", num_prompt_tokens=17), add("second", num_prompt_tokens=9)


def sent(message: AddRequest) -> AddRequest:
    """A message as it arrives."""
    return msgspec.msgpack.decode(encode_message(msgspec.msgpack.Encoder(), message), type=AddRequest)


@pytest.fixture(autouse=True)
def pieces_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompts, "PIECE_TOKENS", 8)


def test_a_turn_decodes_one_piece_and_others_pass() -> None:
    arrivals = ArrivingPrompts()
    assert arrivals.turn([sent(LONG), sent(SECOND), sent(SHORT)]) == [SHORT]
    assert arrivals
    assert arrivals.turn([Call(1, "check")]) == [Call(1, "check")]
    assert [arrivals.turn([]) for _ in range(3)] == [[LONG], [], [SECOND]]
    assert not arrivals
    assert arrivals.turn([]) == []


def test_an_abort_leaves_nothing_of_the_request() -> None:
    arrivals = ArrivingPrompts()
    assert arrivals.turn([sent(LONG)]) == []
    assert arrivals.turn([Abort("long"), Abort("other")]) == [Abort("other")]
    assert not arrivals


def test_the_end_of_one_sequence_follows_the_request() -> None:
    arrivals = ArrivingPrompts()
    turns = [arrivals.turn([sent(LONG)]), arrivals.turn([Abort("long", 1)]), arrivals.turn([Abort("long", 0)])]
    assert turns == [[], [], [LONG, Abort("long", 1), Abort("long", 0)]]


def test_what_is_sent() -> None:
    encoded_before = AddRequest(LONG.request, encode_pieces(LONG.request.prompt_token_ids))
    for message in (LONG, encoded_before):
        arrived = sent(message)
        assert [len(msgspec.msgpack.decode(piece)) for piece in arrived.pieces] == [8, 8, 1]
        assert arrived.request == msgspec.structs.replace(LONG.request, prompt_token_ids=[])
    assert sent(add("eight", num_prompt_tokens=8)) == add("eight", num_prompt_tokens=8)


async def test_the_async_engine_sends_all_of_it(process_engine: AsyncLLM, options: EngineOptions) -> None:
    token_ids = LONG.request.prompt_token_ids
    last = [output async for output in process_engine.generate(token_ids, LONG.request.params)][-1]
    inline = InProcessClient(options, executor="tests.fakes.factories:plain")
    inline.send(LONG)
    assert last.outputs[0].token_ids == tokens_until_finished(inline, "long")["long"]
    assert (await process_engine.stats()).prompt_tokens_total == len(token_ids)
