"""Transfer of long prompts between processes in pieces. The engine decodes one per turn; running requests do not
wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from quire.engine.messages import Abort, AddRequest, ClientMessage, SessionMessage

PIECE_TOKENS = 2**15
"""Tokens of one message of a long prompt; decoding one takes a millisecond."""
UNCOPIED_BYTES = 2**16
"""Size from which a message part is sent without a copy."""

_DECODER = msgspec.msgpack.Decoder(list[int])


def encode_pieces(token_ids: list[int]) -> list[bytes]:
    """Token ids of a long prompt as separately encoded bytes (`AddRequest.pieces`); empty for a short one. Other
    threads may run between two pieces."""
    if len(token_ids) <= PIECE_TOKENS:
        return []
    starts = range(0, len(token_ids), PIECE_TOKENS)
    return [msgspec.msgpack.encode(token_ids[start : start + PIECE_TOKENS]) for start in starts]


def encode_message(encoder: msgspec.msgpack.Encoder, message: SessionMessage) -> bytes:
    """Encode a message; a long prompt is replaced by its pieces."""
    if isinstance(message, AddRequest):
        request = message.request
        pieces = message.pieces or encode_pieces(request.prompt_token_ids)
        if pieces:
            message = AddRequest(msgspec.structs.replace(request, prompt_token_ids=[]), pieces)
    return encoder.encode(message)


def send_parts(socket: zmq.Socket[bytes], parts: Sequence[bytes]) -> None:
    """Send one message without waiting, and without copying its long parts."""
    socket.send_multipart(parts, zmq.NOBLOCK, copy=max(map(len, parts)) < UNCOPIED_BYTES)


def take_piece(message: AddRequest) -> None:
    """Decode the next piece of a received message, so long prompts block no other message."""
    message.request.prompt_token_ids.extend(_DECODER.decode(message.pieces.pop(0)))


@dataclass(slots=True)
class _ArrivingPrompt:
    message: AddRequest
    aborts: list[Abort] = field(default_factory=list)
    """Aborts of single sequences, to be handled after the request."""


class ArrivingPrompts:
    """Requests that an engine still decodes, in order. Other messages overtake them."""

    def __init__(self) -> None:
        self._arrivals: list[_ArrivingPrompt] = []

    def __bool__(self) -> bool:
        return bool(self._arrivals)

    def turn(self, messages: Iterable[ClientMessage]) -> list[ClientMessage]:
        """Accept messages and decode a piece of the first long prompt. Returns the messages for the engine core."""
        complete: list[ClientMessage] = []
        for message in messages:
            if isinstance(message, AddRequest) and message.pieces:
                self._arrivals.append(_ArrivingPrompt(message))
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
        """Apply an abort to a request whose prompt is still decoded; one of a single sequence is kept until then.
        Returns whether there was such a request."""
        for number, arrival in enumerate(self._arrivals):
            if arrival.message.request.request_id == abort.request_id:
                if abort.index is None:
                    del self._arrivals[number]
                else:
                    arrival.aborts.append(abort)
                return True
        return False
