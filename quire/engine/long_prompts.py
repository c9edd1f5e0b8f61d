"""Long prompts between processes: their token ids are sent in pieces, which the engine decodes one in a turn, so that
running requests do not wait for a prompt that arrives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from quire.engine.messages import Abort, AddRequest, ClientMessage, SessionMessage

PIECE_TOKENS = 2**15
"""Decoded in a millisecond."""
UNCOPIED_BYTES = 2**16
"""From here on a part is sent from where it lies."""

_DECODER = msgspec.msgpack.Decoder(list[int])


def encode_pieces(token_ids: list[int]) -> list[bytes]:
    """`AddRequest.pieces` of a prompt; none of a short one. Other threads run between two pieces, none within one."""
    if len(token_ids) <= PIECE_TOKENS:
        return []
    starts = range(0, len(token_ids), PIECE_TOKENS)
    return [msgspec.msgpack.encode(token_ids[start : start + PIECE_TOKENS]) for start in starts]


def encode_message(encoder: msgspec.msgpack.Encoder, message: SessionMessage) -> bytes:
    """As it is sent: a long prompt is in pieces alone."""
    if isinstance(message, AddRequest):
        request = message.request
        pieces = message.pieces or encode_pieces(request.prompt_token_ids)
        if pieces:
            message = AddRequest(msgspec.structs.replace(request, prompt_token_ids=[]), pieces)
    return encoder.encode(message)


def send_parts(socket: zmq.Socket[bytes], parts: Sequence[bytes]) -> None:
    """One message, without waiting for room. Long parts are sent from where they lie: to copy the 9 MB of two million
    token ids held the event loop for 14 ms. Short ones are copied, which takes less than to be told of their end."""
    socket.send_multipart(parts, zmq.NOBLOCK, copy=max(map(len, parts)) < UNCOPIED_BYTES)


def take_piece(message: AddRequest) -> None:
    """Decode a piece of a message as it was sent."""
    message.request.prompt_token_ids.extend(_DECODER.decode(message.pieces.pop(0)))


@dataclass(slots=True)
class _Arrival:
    message: AddRequest
    aborts: list[Abort] = field(default_factory=list)
    """Of single sequences, to follow the request."""


class Arrivals:
    """The requests that an engine is still decoding, in order. Other messages pass them."""

    def __init__(self) -> None:
        self._arrivals: list[_Arrival] = []

    def __bool__(self) -> bool:
        return bool(self._arrivals)

    def turn(self, messages: Iterable[ClientMessage]) -> list[ClientMessage]:
        """Take what was sent, and decode a piece of the first long prompt. Returns the messages for the engine core."""
        complete: list[ClientMessage] = []
        for message in messages:
            if isinstance(message, AddRequest) and message.pieces:
                self._arrivals.append(_Arrival(message))
            elif not (isinstance(message, Abort) and self._abort(message)):
                complete.append(message)
        if self._arrivals:
            first = self._arrivals[0]
            take_piece(first.message)
            if not first.message.pieces:
                del self._arrivals[0]
                complete += [first.message, *first.aborts]
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
