"""From the bytes of a request to its parsed body: a short one is parsed here, a large one by a helper
(reading_helper.py)."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from fastapi import Request

from quire.server.body import parse_body, read_body, report_ignored
from quire.server.context import ServerContext
from quire.server.disconnect import run_until_disconnect
from quire.server.json_bodies import in_flight
from quire.server.protocol.chat import ChatBatchRequest
from quire.server.protocol.messages import ReadMessages
from quire.server.protocol.response_items import ReadInput
from quire.server.protocol.responses import ResponsesRequest
from quire.server.reading_helper import Found, How, Rejected, Unread, conversations_of, input_of
from quire.tokenization.conversation import Messages

LONG_BODY_BYTES = 2**20
"""Larger bodies are read elsewhere: smaller ones hold the event loop for less than the hop to a process takes."""
_READER = "quire.server.reading_helper:read"
_ANSWERS: msgspec.msgpack.Decoder[Found | Unread | Rejected] = msgspec.msgpack.Decoder(Found | Unread | Rejected)

T = TypeVar("T", bound=msgspec.Struct)


async def read_request(request: Request, context: ServerContext, kind: type[T]) -> T:
    """Read and parse the body of a request; its unknown fields are logged once each, and reported in a header. In place
    of its messages it has a ReadMessages for each conversation; of a large body the process that streams never
    holds the parsed messages.

    Raises as `read_body`, `parse_body` and `messages_of`, ClientDisconnectedError, and UserError for a large body that
    takes READ_SECONDS of processor time. Until a large body is read it counts among those that are being received,
    which bounds what waits here."""
    strict = context.settings.strict_fields

    def parse(body: bytes) -> tuple[T, list[str]]:
        parsed, unknown = parse_body(body, kind, strict=strict)
        if isinstance(parsed, ResponsesRequest):
            found = input_of(parsed)
            return (parsed if found is None else msgspec.structs.replace(parsed, input=found)), unknown
        return _with_conversations(parsed, conversations_of(parsed)), unknown

    def decode(answer: bytes | bytearray) -> tuple[T, list[str]] | Unread | Rejected:
        found = _ANSWERS.decode(answer)
        if not isinstance(found, Found):
            return found
        parsed = msgspec.json.decode(found.body, type=kind)
        changes: dict[str, Any] = {ids.field: ids.value for ids in found.ids}
        if found.items is not None:
            changes["input"] = ReadInput(found.conversations[0], found.items)
            found.conversations = []
        parsed = msgspec.structs.replace(parsed, **changes) if changes else parsed
        return _with_conversations(parsed, found.conversations), found.unknown

    parts = await read_body(request, context.max_body_bytes)
    size = sum(map(len, parts))
    found: tuple[T, list[str]] | Unread | Rejected = Unread()
    if size > LONG_BODY_BYTES:
        how = msgspec.json.encode(How.of(kind, strict=strict)).decode()
        with in_flight(request.scope):
            reading = context.engine.texts.read_elsewhere(_READER, how, parts, decode)
            found = await run_until_disconnect(request.receive, reading)
    if isinstance(found, Rejected):
        raise found.error
    if isinstance(found, Unread):
        found = await context.engine.texts.off_loop(size, lambda: parse(b"".join(parts)))
    parsed, unknown = found
    report_ignored(request, context, unknown)
    return parsed


def _with_conversations(parsed: T, conversations: list[Messages]) -> T:
    """The body with these in place of its messages."""
    if not conversations:
        return parsed
    given: Any = getattr(parsed, "messages")  # noqa: B009 - of a type that is known to have them
    if isinstance(parsed, ChatBatchRequest):
        pairs = zip(given, conversations, strict=True)
        return msgspec.structs.replace(parsed, messages=[ReadMessages(each[-1], found) for each, found in pairs])
    return msgspec.structs.replace(parsed, messages=ReadMessages(given[-1], conversations[0]))
