"""Large chat requests are read in the processes of long texts (quire/engine/long_texts.py): while JSON is decoded and
converted no other thread of a process runs, and each collection of garbage looks through what was made of a body.

Such a process parses and checks the body, and encodes its messages as the process that renders the chat template gets
them. The API's process gets those bytes, which it passes on, and the rest of the body with its last message alone.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
from fastapi import Request

from quire.errors import UserError
from quire.server.body import parse_body, parse_request, read_body, report_ignored
from quire.server.context import ServerContext
from quire.server.errors import ApiError, ErrorDetail
from quire.server.protocol.chat import ChatRequest, LongChatRequest
from quire.tokenization.chat_template import PreparedConversation, prepare_conversation

LONG_BODY_BYTES = 2**20
"""Larger bodies are read elsewhere: smaller ones hold the event loop for less than the hop to a process takes."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRIES = msgspec.json.Decoder(list[msgspec.Raw])


class Problem(msgspec.Struct):
    """Of the messages, found before the template is asked for: a UserError."""

    message: str
    param: str | None


class Rejected(msgspec.Struct, tag=True):
    """The body is wrong: an ApiError."""

    status: int
    detail: ErrorDetail


class Chat(msgspec.Struct, tag=True):
    """body: JSON, with the last message alone. unknown: fields of the whole body. messages: all, encoded for the
    template's process."""

    body: bytes
    unknown: list[str]
    messages: list[msgspec.Raw]
    problem: Problem | None


_DECODER = msgspec.msgpack.Decoder(Chat | Rejected)


async def read_chat_request(request: Request, context: ServerContext) -> ChatRequest:
    """As `read_request`, of a chat: of a large body the process that streams never holds the parsed messages."""
    body = await read_body(request, context.max_body_bytes)
    strict = context.settings.strict_fields
    answer = None
    if len(body) > LONG_BODY_BYTES:
        reader = read_strictly if strict else read_leniently
        answer = await context.engine.read_elsewhere(f"{__name__}:{reader.__name__}", body)
    if answer is None:
        return await parse_request(request, context, body, ChatRequest)
    del body
    found = _DECODER.decode(answer)
    if isinstance(found, Rejected):
        raise ApiError(found.status, found.detail)
    # The rest may be large as well, where one message is, or there are documents.
    parsed, _ = await asyncio.to_thread(partial(parse_body, found.body, ChatRequest, strict=strict))
    report_ignored(request, context, found.unknown)
    problem = found.problem
    wrong = None if problem is None else UserError(problem.message, param=problem.param)
    fields: dict[str, Any] = {name: getattr(parsed, name) for name in parsed.__struct_fields__}
    conversation = PreparedConversation(found.messages, parsed.continue_final_message, wrong)
    return LongChatRequest(**fields, conversation=conversation)


def read_leniently(body: bytes) -> bytes:
    """In the other process."""
    return _read(body, strict=False)


def read_strictly(body: bytes) -> bytes:
    """As `read_leniently`, under --strict-fields."""
    return _read(body, strict=True)


def _read(body: bytes, *, strict: bool) -> bytes:
    try:
        parsed, unknown = parse_body(body, ChatRequest, strict=strict)
    except ApiError as error:
        return msgspec.msgpack.encode(Rejected(error.status, error.detail))
    try:
        messages = parsed.with_tools.messages
    except UserError:
        messages = parsed.messages  # the answer raises the same, before it comes to the template
    conversation = prepare_conversation(
        [message.to_dict() for message in messages], continue_final_message=parsed.continue_final_message
    )
    fields = _FIELDS.decode(body)
    rest = {**fields, "messages": [_ENTRIES.decode(fields["messages"])[-1]]}
    wrong = conversation.error
    problem = None if wrong is None else Problem(wrong.message, wrong.param)
    return msgspec.msgpack.encode(Chat(msgspec.json.encode(rest), unknown, conversation.messages, problem))
