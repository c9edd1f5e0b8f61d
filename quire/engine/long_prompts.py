"""Long prompts between processes: their token ids are sent in pieces, which the engine decodes one in a turn, so that
running requests do not wait for a prompt that arrives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from quire.engine.messages import Abort, AddRequest, Ask, ClientMessage
from quire.request import EngineRequest

PIECE_TOKENS = 2**15
"""Decoded in a millisecond."""


class AddLongRequest(msgspec.Struct, tag="add long", array_like=True):
    """AddRequest on the wire. request: without its prompt's tokens. pieces: these, each piece encoded by itself."""

    request: EngineRequest
    pieces: list[bytes]

    def take_piece(self) -> bool:
        """Decode a piece. Returns whether the request is complete."""
        self.request.prompt_token_ids.extend(_PIECE.decode(self.pieces.pop(0)))
        return not self.pieces

    def whole(self) -> AddRequest:
        """Decode what is left."""
        while not self.take_piece():
            pass
        return AddRequest(self.request)


_PIECE = msgspec.msgpack.Decoder(list[int])


def encode_message(encoder: msgspec.msgpack.Encoder, message: ClientMessage | Ask) -> bytes:
    """For a decoder of AddLongRequest and the message's own type."""
    if isinstance(message, AddRequest) and len(message.request.prompt_token_ids) > PIECE_TOKENS:
        token_ids = message.request.prompt_token_ids
        starts = range(0, len(token_ids), PIECE_TOKENS)
        pieces = [encoder.encode(token_ids[start : start + PIECE_TOKENS]) for start in starts]
        return encoder.encode(AddLongRequest(msgspec.structs.replace(message.request, prompt_token_ids=[]), pieces))
    return encoder.encode(message)


@dataclass(slots=True)
class _Arrival:
    message: AddLongRequest
    aborts: list[Abort] = field(default_factory=list)
    """Of single sequences, to follow the request."""


class Arrivals:
    """The requests that an engine is still decoding, in order. Other messages pass them."""

    def __init__(self) -> None:
        self._arrivals: list[_Arrival] = []

    def __bool__(self) -> bool:
        return bool(self._arrivals)

    def turn(self, messages: Iterable[ClientMessage | AddLongRequest]) -> list[ClientMessage]:
        """Take what has come, and decode a piece of the first long prompt. Returns the messages for the engine core."""
        complete: list[ClientMessage] = []
        for message in messages:
            if isinstance(message, AddLongRequest):
                self._arrivals.append(_Arrival(message))
            elif not (isinstance(message, Abort) and self._abort(message)):
                complete.append(message)
        if self._arrivals and self._arrivals[0].message.take_piece():
            first = self._arrivals.pop(0)
            complete += [AddRequest(first.message.request), *first.aborts]
        return complete

    def _abort(self, abort: Abort) -> bool:
        """End a request here, or note the end of one of its sequences. Returns whether the request is here."""
        for number, arrival in enumerate(self._arrivals):
            if arrival.message.request.request_id == abort.request_id:
                if abort.index is None:
                    del self._arrivals[number]
                else:
                    arrival.aborts.append(abort)
                return True
        return False
