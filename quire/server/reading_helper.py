"""Reader of large request bodies in a helper process, whose processor time is limited: parses and checks them for
reading.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from quire.errors import UserError
from quire.registry import load_target
from quire.server.body import parse_body, raw_fields
from quire.server.errors import ApiError, ErrorDetail, to_api_error
from quire.server.protocol.anthropic import CountTokensRequest
from quire.server.protocol.chat import ChatBatchRequest, ChatRequest
from quire.server.protocol.messages import ChatMessage
from quire.server.protocol.ollama import OllamaMessage
from quire.server.protocol.response_items import (
    Continuation,
    ListedItems,
    ReadInput,
    UnresolvedItems,
    items_of,
    messages_of_items,
    response_of_item,
)
from quire.server.protocol.responses import ResponsesRequest
from quire.tokenization.conversation import Messages, messages_of
from quire.tokenization.jobs import listed, packed

OF_IDS = ("prompt", "input", "tokens")
"""Fields that may hold token ids."""


class How(msgspec.Struct):
    """Instructions to the helper for parsing a body. kind: "module:name" of its struct. strict: refuse unknown
    fields."""

    kind: str
    strict: bool

    @classmethod
    def of(cls, kind: type[msgspec.Struct], *, strict: bool) -> How:
        return cls(f"{kind.__module__}:{kind.__qualname__}", strict)

    def parse(self, body: bytes) -> tuple[Any, list[str]]:
        return parse_body(body, load_target(self.kind), strict=self.strict)


class Rejected(msgspec.Struct, tag=True):
    """Helper's answer for an invalid body: an ApiError's fields."""

    status: int
    detail: ErrorDetail

    @property
    def error(self) -> ApiError:
        return ApiError(self.status, self.detail)


class Ids(msgspec.Struct):
    """Packed token ids of a field. is_one: the field is one list of ids, not a list of lists."""

    field: str
    lists: list[bytes]
    is_one: bool

    @classmethod
    def of(cls, field: str, value: Any) -> Ids | None:
        """Token ids of a field, packed for reading.py; None for other values."""
        lists = value if isinstance(value, list) else []
        is_one = all(isinstance(each, int) for each in lists)
        if not lists or not (is_one or all(_has_ids_alone(each) for each in lists)):
            return None
        return cls(field, [packed(each) for each in ([lists] if is_one else lists)], is_one)

    @property
    def value(self) -> list[int] | list[list[int]]:
        found = [listed(each) for each in self.lists]
        return found[0] if self.is_one else found


def _has_ids_alone(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) for each in value)


class Found(msgspec.Struct, tag=True):
    """body: JSON without messages and token ids. unknown: unknown fields. conversations:
    messages. ids: token ids by field. items: only for /v1/responses. Other readers leave fields empty."""

    body: bytes
    unknown: list[str]
    conversations: list[Messages]
    ids: list[Ids]
    items: ListedItems | UnresolvedItems | None = None

    @classmethod
    def of_input(cls, messages: Messages, items: ListedItems) -> Found:
        return cls(b"", [], [messages], [], items)


def read(argument: str, body: bytes) -> bytes:
    """Parse a body in the helper process, for `read_request`."""
    return _answered(lambda: _read(msgspec.json.decode(argument, type=How), body))


def go_on(argument: str, content: bytes) -> bytes:
    """Join stored and sent items in the helper process, for `read_continuation`."""
    return _answered(lambda: Found.of_input(*msgspec.json.decode(argument, type=Continuation).join(content)))


def names(_argument: str, body: bytes) -> bytes:
    """List the fields of a body that are not null, in `unknown`, for the choice of a route."""
    return _answered(lambda: Found(b"", names_of(body), [], []))


def _answered(work: Callable[[], Found]) -> bytes:
    answer: Found | Rejected
    try:
        answer = work()
    except (ApiError, UserError) as error:
        failure = to_api_error(error)
        answer = Rejected(failure.status, failure.detail)
    return msgspec.msgpack.encode(answer)


def _read(how: How, body: bytes) -> Found:
    parsed, unknown = how.parse(body)
    found = [Ids.of(name, getattr(parsed, name, None)) for name in OF_IDS]
    ids = [each for each in found if each is not None]
    changes: dict[str, Any] = {each.field: [0] for each in ids}
    items = None
    if isinstance(parsed, ResponsesRequest):
        given = input_of(parsed)
        changes["input"], items = "", given.items
        conversations = [] if given.messages is None else [given.messages]
    elif conversations := conversations_of(parsed):
        lasts = [[_last_message(parsed, each[-1])] for each in _message_lists(parsed)]
        changes["messages"] = lasts if isinstance(parsed, ChatBatchRequest) else lasts[0]
        if isinstance(parsed, CountTokensRequest):
            changes["system"] = None
    return Found(_written_body(msgspec.structs.replace(parsed, **changes)), unknown, conversations, ids, items)


def _written_body(parsed: msgspec.Struct) -> bytes:
    try:
        return msgspec.json.encode(parsed)
    except OverflowError:  # an integer of more than 64 bits
        return json.dumps(msgspec.to_builtins(parsed, str_keys=True)).encode()


def names_of(body: bytes) -> list[str]:
    """Fields of a body that are not null. Raises ApiError (400) if it is not a JSON object."""
    return [name for name, value in raw_fields(body).items() if bytes(value) != b"null"]


def input_of(parsed: ResponsesRequest) -> ReadInput:
    """Input of a response. Raises UserError with the path of an invalid field."""
    given = items_of(parsed.input)
    references = [item.id or "" for item in given if item.type == "item_reference"]
    if references or parsed.previous_response_id is not None:
        response_ids = list(dict.fromkeys(map(response_of_item, references)))
        return ReadInput(None, UnresolvedItems(msgspec.json.encode(given), response_ids))
    return ReadInput(messages_of_items(given, parsed.instructions), ListedItems.of(given))


def conversations_of(parsed: Any) -> list[Messages]:
    """Messages of each conversation of a body, if any. Raises UserError with the path of an invalid field."""
    if not getattr(parsed, "messages", None):
        return []
    if isinstance(parsed, ChatBatchRequest):
        return [messages_of(_written(each), f"messages[{index}]") for index, each in enumerate(parsed.messages)]
    given = getattr(parsed, "chat_messages", None)
    return [messages_of(_written(parsed.messages) if given is None else given)]


def _written(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    return [message.to_dict() for message in messages]


def _message_lists(parsed: Any) -> list[list[Any]]:
    return parsed.messages if isinstance(parsed, ChatBatchRequest) else [parsed.messages]


def _last_message(parsed: Any, message: Any) -> Any:
    """Reduce the last message to its role, and what an echo or continuation needs."""
    if isinstance(parsed, ChatRequest) and parsed.echo:
        return message
    calls = {"tool_calls": message.tool_calls} if isinstance(message, OllamaMessage) else {}
    return type(message)(role=message.role, content="", **calls)
