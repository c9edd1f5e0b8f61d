"""The reader of large request bodies, in a helper process: while JSON is decoded and converted no other thread of a
process runs, each collection of garbage looks through what was made of a body, and nothing but the end of a process
bounds the processor time of one.

The helper parses and checks the body, and makes the messages of its conversations. The API's process (reading.py) gets
those as bytes, which it passes on, packed token ids, and the rest of the body as it was parsed.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from quire.errors import UserError
from quire.registry import load_target
from quire.server.body import parse_body
from quire.server.errors import ApiError, ErrorDetail, to_api_error
from quire.server.protocol.anthropic import CountTokensRequest
from quire.server.protocol.chat import ChatBatchRequest, ChatRequest
from quire.server.protocol.messages import ChatMessage
from quire.server.protocol.ollama import OllamaMessage
from quire.server.protocol.response_items import ListedItems, ReadInput, items_of
from quire.server.protocol.responses import ResponsesRequest
from quire.tokenization.conversation import Messages, messages_of
from quire.tokenization.jobs import listed, packed

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


OF_IDS = ("prompt", "input", "tokens")
"""Fields that may have token ids."""


class How(msgspec.Struct):
    """How the other process reads a body. kind: "module:name" of its struct; strict: under --strict-fields."""

    kind: str
    strict: bool

    @classmethod
    def of(cls, kind: type[msgspec.Struct], *, strict: bool) -> How:
        return cls(f"{kind.__module__}:{kind.__qualname__}", strict)

    def parse(self, body: bytes) -> tuple[Any, list[str]]:
        """As `parse_body`."""
        return parse_body(body, load_target(self.kind), strict=self.strict)


class Rejected(msgspec.Struct, tag=True):
    """The body is wrong: an ApiError."""

    status: int
    detail: ErrorDetail

    @property
    def error(self) -> ApiError:
        return ApiError(self.status, self.detail)


class Unread(msgspec.Struct, tag=True):
    """The API's process reads the body: the conversation goes on from stored responses, which the helper does not
    have, or what was parsed cannot be written."""


class Ids(msgspec.Struct):
    """The token ids of one field of a body, packed. is_one: the field is a list of ids itself, and no list of lists."""

    field: str
    lists: list[bytes]
    is_one: bool

    @classmethod
    def of(cls, field: str, value: Any) -> Ids | None:
        """None for a value without token ids."""
        lists = value if isinstance(value, list) else []
        is_one = bool(lists) and isinstance(lists[0], int)
        if not lists or not (is_one or isinstance(lists[0], list)):
            return None
        return cls(field, [packed(each) for each in ([lists] if is_one else lists)], is_one)

    @property
    def value(self) -> list[int] | list[list[int]]:
        found = [listed(each) for each in self.lists]
        return found[0] if self.is_one else found


class Found(msgspec.Struct, tag=True):
    """body: JSON of what was parsed, without messages and token ids. unknown: fields of the whole body. conversations:
    its messages. ids: of fields that have them. items: of /v1/responses, to be listed."""

    body: bytes
    unknown: list[str]
    conversations: list[Messages]
    ids: list[Ids]
    items: ListedItems | None = None


def read(argument: str, body: bytes) -> bytes:
    """What `read_request` asks of the helper."""
    try:
        answer: Found | Unread | Rejected = _read(msgspec.json.decode(argument, type=How), body)
    except (ApiError, UserError) as error:
        failure = to_api_error(error)
        answer = Rejected(failure.status, failure.detail)
    return msgspec.msgpack.encode(answer)


def _read(how: How, body: bytes) -> Found | Unread:
    parsed, unknown = how.parse(body)
    found = [Ids.of(name, getattr(parsed, name, None)) for name in OF_IDS]
    ids = [each for each in found if each is not None]
    changes: dict[str, Any] = {each.field: [0] for each in ids}
    items = None
    if isinstance(parsed, ResponsesRequest):
        if (given := input_of(parsed)) is None:
            return Unread()
        changes["input"], conversations, items = "", [given.messages], given.items
    elif conversations := conversations_of(parsed):
        lasts = [[_last_message(parsed, each[-1])] for each in _message_lists(parsed)]
        changes["messages"] = lasts if isinstance(parsed, ChatBatchRequest) else lasts[0]
        if isinstance(parsed, CountTokensRequest):
            changes["system"] = None
    try:
        written = msgspec.json.encode(msgspec.structs.replace(parsed, **changes))
    except (TypeError, OverflowError):
        return Unread()  # an integer of more than 64 bits
    return Found(written, unknown, conversations, ids, items)


def raw_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """All fields of a JSON object, undecoded. Raises msgspec.DecodeError for a body that is none."""
    return _FIELDS.decode(body)


def input_of(parsed: ResponsesRequest) -> ReadInput | None:
    """The input of a response; None where it goes on from stored ones. Raises UserError with the path of a field that
    is wrong."""
    given = items_of(parsed.input)
    if parsed.previous_response_id is not None or any(item.type == "item_reference" for item in given):
        return None
    return ReadInput(parsed.messages_of(given), ListedItems.of(given, secrets.token_hex(16)))


def conversations_of(parsed: Any) -> list[Messages]:
    """The messages of each conversation of a body; none where it has none. Raises UserError with the path of a field
    that is wrong."""
    if not getattr(parsed, "messages", None):
        return []
    if isinstance(parsed, ChatBatchRequest):
        return [messages_of(_written(each), f"messages[{index}]") for index, each in enumerate(parsed.messages)]
    given = getattr(parsed, "chat_messages", None)
    return [messages_of(_written(parsed.messages) if given is None else given)]


def _written(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    return [message.to_dict() for message in messages]


def _message_lists(parsed: Any) -> list[list[Any]]:
    """The messages of each conversation."""
    return parsed.messages if isinstance(parsed, ChatBatchRequest) else [parsed.messages]


def _last_message(parsed: Any, message: Any) -> Any:
    """Of the last message the API's process needs the role, the text only where the answer repeats it, and calls only
    where an answer that goes on behind it may not."""
    if isinstance(parsed, ChatRequest) and parsed.echo:
        return message
    calls = {"tool_calls": message.tool_calls} if isinstance(message, OllamaMessage) else {}
    return type(message)(role=message.role, content="", **calls)
