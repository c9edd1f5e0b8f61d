"""Large bodies of /v1/messages and /v1/responses: another process reads them, as those of other routes are read
(long_bodies.py), and makes the chat completion that they mean."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from fastapi import Request

from quire.errors import UserError
from quire.server.body import parse_body, parse_request, read_body, report_ignored
from quire.server.context import ServerContext
from quire.server.errors import ApiError, to_api_error
from quire.server.long_bodies import Conversation, How, Rejected, fields_of, read_elsewhere
from quire.server.protocol import anthropic, responses
from quire.server.protocol.anthropic import CountTokensRequest
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.messages import LongMessages
from quire.server.protocol.response_items import items_of
from quire.server.protocol.responses import ResponsesRequest
from quire.server.response_answer import ListedItems
from quire.server.turn import chat_body
from quire.tokenization.chat_template import PreparedConversation

T = TypeVar("T", bound=msgspec.Struct)


class FoundChat(msgspec.Struct, tag=True):
    """body: JSON, without a conversation worth the name. unknown: fields of the whole body. wrong: with the chat
    completion, found once the model's name is known to be right. items: for /v1/responses."""

    body: bytes
    unknown: list[str]
    conversation: Conversation | None = None
    wrong: Rejected | None = None
    items: ListedItems | None = None


class NeedsStore(msgspec.Struct, tag=True):
    """The conversation goes on from stored responses, which the other process does not have."""


_DECODER = msgspec.msgpack.Decoder(FoundChat | NeedsStore | Rejected)


class ReadChat(NamedTuple, Generic[T]):
    """A body that was read. Of a large one conversation, error and items are known, and `body` has a stand-in for its
    messages or items."""

    body: T
    conversation: PreparedConversation | None = None
    error: ApiError | None = None
    items: ListedItems | None = None

    def check(self) -> None:
        """Raise what is wrong with the chat completion."""
        if self.error is not None:
            raise self.error

    def chat(self, fields: dict[str, Any], names: dict[str, str]) -> ChatRequest:
        """The chat completion of `fields` (`chat_body`), with the conversation."""
        chat = chat_body(fields, names)
        if self.conversation is None:
            return chat
        return msgspec.structs.replace(chat, messages=LongMessages(chat.messages[-1], self.conversation))


async def read_chat(request: Request, context: ServerContext, kind: type[T]) -> ReadChat[T]:
    """As `read_request`: of a large body the process that streams never holds the conversation."""
    strict = context.settings.strict_fields

    def decode(answer: bytes) -> tuple[ReadChat[T], list[str]] | NeedsStore | Rejected:
        found: FoundChat | NeedsStore | Rejected = _DECODER.decode(answer)
        if not isinstance(found, FoundChat):
            return found
        parsed, _ = parse_body(found.body, kind, strict=strict)
        conversation = None if found.conversation is None else found.conversation.prepared
        error = None if found.wrong is None else found.wrong.error
        return ReadChat(parsed, conversation, error, found.items), found.unknown

    body = await read_body(request, context.max_body_bytes)
    found = await read_elsewhere(request, context, body, f"{__name__}:read", kind, decode)
    if isinstance(found, Rejected):
        raise found.error
    if found is None or isinstance(found, NeedsStore):
        return ReadChat(await parse_request(request, context, body, kind))
    whole, unknown = found
    report_ignored(request, context, unknown)
    return whole


def read(argument: str, body: bytes) -> bytes:
    """In the other process."""
    how = msgspec.json.decode(argument, type=How)
    answer: FoundChat | NeedsStore | Rejected
    try:
        parsed, unknown = how.parse(body)
    except ApiError as error:
        answer = Rejected(error.status, error.detail)
    else:
        fields = fields_of(body, parsed)
        if isinstance(parsed, ResponsesRequest):
            answer = _of_response(parsed, fields, unknown)
        else:
            assert isinstance(parsed, CountTokensRequest)
            answer = _of_message(parsed, fields, unknown)
    return msgspec.msgpack.encode(answer)


def _of_message(parsed: CountTokensRequest, fields: dict[str, Any], unknown: list[str]) -> FoundChat:
    fields["messages"] = [{"role": parsed.messages[-1].role, "content": ""}]
    fields.pop("system", None)
    found = FoundChat(msgspec.json.encode(fields), unknown)
    _add_conversation(found, parsed.to_chat, anthropic.NAMES)
    return found


def _of_response(parsed: ResponsesRequest, fields: dict[str, Any], unknown: list[str]) -> FoundChat | NeedsStore:
    items = items_of(parsed.input)
    if parsed.previous_response_id is not None or any(item.type == "item_reference" for item in items):
        return NeedsStore()
    fields["input"] = ""
    found = FoundChat(msgspec.json.encode(fields), unknown)
    _add_conversation(found, lambda: parsed.to_chat(items), responses.NAMES)
    if parsed.store:
        found.items = ListedItems.of(items, secrets.token_hex(16))
    return found


def _add_conversation(found: FoundChat, to_chat: Callable[[], dict[str, Any]], names: dict[str, str]) -> None:
    try:
        chat = chat_body(to_chat(), names)
    except (ApiError, UserError) as error:
        failure = to_api_error(error)
        found.wrong = Rejected(failure.status, failure.detail)
    else:
        found.conversation = Conversation.of(chat.messages, continue_final_message=chat.continue_final_message)
