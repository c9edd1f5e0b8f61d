"""Reading and parsing of request bodies: short ones here, large ones in a helper process (reading_helper.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from quire.server.body import parse_body, read_body, report_ignored
from quire.server.context import ServerContext
from quire.server.disconnect import run_until_disconnect
from quire.server.json_bodies import in_flight
from quire.server.protocol.chat import ChatBatchRequest
from quire.server.protocol.messages import ReadMessages
from quire.server.protocol.response_items import Continuation, ListedItems, ReadInput
from quire.server.protocol.responses import ResponsesRequest
from quire.server.reading_helper import Found, How, Rejected, conversations_of, input_of, names_of
from quire.tokenization.conversation import Messages

LONG_BODY_BYTES = 2**17
"""Size above which a helper reads a body."""
_READERS = "quire.server.reading_helper"
_ANSWERS: msgspec.msgpack.Decoder[Found | Rejected] = msgspec.msgpack.Decoder(Found | Rejected)

R = TypeVar("R")
T = TypeVar("T", bound=msgspec.Struct)


async def read_request(request: Request, context: ServerContext, kind: type[T]) -> T:
    """Read and parse a body; log and report its unknown fields. A ReadMessages replaces each conversation; a new
    adapter named as the model is read. Raises as `read_body`, `parse_body` and `messages_of` do;
    ClientDisconnectedError; UserError for a large body that takes READ_SECONDS of processor time, or an unreadable
    adapter."""
    strict = context.settings.strict_fields

    def parse(body: bytes) -> tuple[T, list[str]]:
        parsed, unknown = parse_body(body, kind, strict=strict)
        if isinstance(parsed, ResponsesRequest):
            return msgspec.structs.replace(parsed, input=input_of(parsed)), unknown
        return _with_conversations(parsed, conversations_of(parsed)), unknown

    def decode(answer: bytes | bytearray) -> tuple[T, list[str]]:
        found = _found(answer)
        parsed = msgspec.json.decode(found.body, type=kind)
        changes: dict[str, Any] = {ids.field: ids.value for ids in found.ids}
        if found.items is not None:
            changes["input"] = ReadInput(next(iter(found.conversations), None), found.items)
            found.conversations = []
        parsed = msgspec.structs.replace(parsed, **changes) if changes else parsed
        return _with_conversations(parsed, found.conversations), found.unknown

    parts = await read_body(request, context.max_body_bytes)
    size = sum(map(len, parts))
    if size > LONG_BODY_BYTES:
        how = msgspec.json.encode(How.of(kind, strict=strict)).decode()
        parsed, unknown = await _elsewhere(request, context, "read", how, parts, decode)
    else:
        parsed, unknown = await context.engine.texts.off_loop(size, lambda: parse(b"".join(parts)))
    report_ignored(request, context, unknown)
    if isinstance(model := getattr(parsed, "model", None), str):
        await context.meet(model)
    return parsed


async def read_names(request: Request, context: ServerContext, parts: list[bytes]) -> list[str]:
    """Fields of a body that are not null. Raises ApiError (400) if it is not a JSON object, otherwise as `read_request`
    does."""
    size = sum(map(len, parts))
    if size > LONG_BODY_BYTES:
        return await _elsewhere(request, context, "names", "", parts, lambda answer: _found(answer).unknown)
    return await context.engine.texts.off_loop(size, lambda: names_of(b"".join(parts)))


async def read_continuation(
    request: Request, context: ServerContext, going_on: Continuation, content: list[bytes]
) -> tuple[Messages, ListedItems]:
    """Join stored and sent items by `Continuation.join`, if large in a helper. Raises as it and `read_request` do."""

    def decode(answer: bytes | bytearray) -> tuple[Messages, ListedItems]:
        found = _found(answer)
        assert isinstance(found.items, ListedItems)
        return found.conversations[0], found.items

    size = sum(going_on.lengths)
    if size > LONG_BODY_BYTES:
        argument = msgspec.json.encode(going_on).decode()
        return await _elsewhere(request, context, "go_on", argument, content, decode)
    return await context.engine.texts.off_loop(size, lambda: going_on.join(b"".join(content)))


async def _elsewhere(
    request: Request,
    context: ServerContext,
    reader: str,
    argument: str,
    content: list[bytes],
    decode: Callable[[bytes | bytearray], R],
) -> R:
    with in_flight(request.scope):
        reading = context.engine.texts.read_elsewhere(f"{_READERS}:{reader}", argument, content, decode)
        return await run_until_disconnect(request.receive, reading)


def _found(answer: bytes | bytearray) -> Found:
    found = _ANSWERS.decode(answer)
    if isinstance(found, Rejected):
        raise found.error
    return found


def _with_conversations(parsed: T, conversations: list[Messages]) -> T:
    if not conversations:
        return parsed
    given: Any = getattr(parsed, "messages")  # noqa: B009 - its type is known to have them
    if isinstance(parsed, ChatBatchRequest):
        pairs = zip(given, conversations, strict=True)
        return msgspec.structs.replace(parsed, messages=[ReadMessages(each[-1], found) for each, found in pairs])
    return msgspec.structs.replace(parsed, messages=ReadMessages(given[-1], conversations[0]))
