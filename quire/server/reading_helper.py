"""The reader of large request bodies, in a helper process: while JSON is decoded and converted no other thread of a
process runs, each collection of garbage looks through what was made of a body, and nothing but the end of a process
bounds the processor time of one.

The helper parses and checks the body, and makes the messages of its conversations. The API's process (reading.py) gets
those as bytes, which it passes on, texts and packed ids, and the rest of the body.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.errors import UserError
from quire.server.body import parse_body
from quire.server.errors import ApiError, ErrorDetail, to_api_error
from quire.server.protocol.chat import ChatBatchRequest, ChatRequest
from quire.server.protocol.cohere import CohereEmbedRequest
from quire.server.protocol.completion import CompletionRequest
from quire.server.protocol.pooling import InputFields, RerankRequest, ScoreRequest
from quire.server.protocol.response_items import ListedItems, ReadInput, items_of
from quire.server.protocol.responses import ResponsesRequest
from quire.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from quire.tokenization.conversation import Messages, messages_of
from quire.tokenization.jobs import listed, packed

STAND_IN = "-"
"""Stand-in for a text that the other process keeps: no route refuses it."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class How(msgspec.Struct):
    """How the other process reads a body. kind: "module:name" of its struct; strict: under --strict-fields."""

    kind: str
    strict: bool

    @classmethod
    def of(cls, kind: type[msgspec.Struct], *, strict: bool) -> How:
        return cls(f"{kind.__module__}:{kind.__qualname__}", strict)

    def parse(self, body: bytes) -> tuple[Any, list[str]]:
        """As `parse_body`."""
        module, _, name = self.kind.partition(":")
        return parse_body(body, getattr(importlib.import_module(module), name), strict=self.strict)


class Rejected(msgspec.Struct, tag=True):
    """The body is wrong: an ApiError."""

    status: int
    detail: ErrorDetail

    @property
    def error(self) -> ApiError:
        return ApiError(self.status, self.detail)


class NeedsStore(msgspec.Struct, tag=True):
    """The conversation goes on from stored responses, which the helper does not have."""


class Text(msgspec.Struct, array_like=True):
    """A text, or the packed ids of one."""

    text: str = ""
    ids: bytes | None = None


class Texts(msgspec.Struct):
    """The texts of one field of a body. is_one: the field is a text itself, or its ids, and no list of them."""

    field: str
    values: list[Text]
    is_one: bool

    @classmethod
    def of(cls, field: str, given: Any, values: Sequence[str | list[int]]) -> Texts:
        """given: the field's value, in which `values` are."""
        texts = [Text(value) if isinstance(value, str) else Text(ids=packed(value)) for value in values]
        return cls(field, texts, isinstance(given, str) or (len(values) == 1 and given is values[0]))

    @property
    def value(self) -> str | list[int] | list[str | list[int]]:
        found = [each.text if each.ids is None else listed(each.ids) for each in self.values]
        return found[0] if self.is_one else found

    @property
    def stand_in(self) -> str | list[str] | list[int]:
        """A value of the field's type without its texts."""
        if self.values[0].ids is not None:
            return [0]
        return STAND_IN if self.is_one else [STAND_IN]


class Found(msgspec.Struct, tag=True):
    """body: JSON, with stand-ins for what the other fields have. unknown: fields of the whole body. conversations: its
    messages. texts: of other fields. items: of /v1/responses, to be listed."""

    body: bytes
    unknown: list[str]
    conversations: list[Messages]
    texts: list[Texts]
    items: ListedItems | None = None


def read(argument: str, body: bytes) -> bytes:
    """What `read_request` asks of the helper."""
    try:
        answer: Found | NeedsStore | Rejected = _read(msgspec.json.decode(argument, type=How), body)
    except (ApiError, UserError) as error:
        failure = to_api_error(error)
        answer = Rejected(failure.status, failure.detail)
    return msgspec.msgpack.encode(answer)


def _read(how: How, body: bytes) -> Found | NeedsStore:
    parsed, unknown = how.parse(body)
    known = parsed.__struct_encode_fields__
    fields: dict[str, Any] = {name: value for name, value in raw_fields(body).items() if name in known}
    texts = [each for each in _texts(parsed) if each.values]
    fields |= {each.field: each.stand_in for each in texts}
    items = None
    if isinstance(parsed, ResponsesRequest):
        if (found := input_of(parsed)) is None:
            return NeedsStore()
        fields["input"] = ""
        conversations, items = [found.messages], found.items
    elif conversations := conversations_of(parsed):
        listed = parsed.messages if isinstance(parsed, ChatBatchRequest) else [parsed.messages]
        lasts = [[_last_message(parsed, messages[-1])] for messages in listed]
        fields["messages"] = lasts if isinstance(parsed, ChatBatchRequest) else lasts[0]
        fields.pop("system", None)
    return Found(msgspec.json.encode(fields), unknown, conversations, texts, items)


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
    if getattr(parsed, "messages", None) is None:
        return []
    if isinstance(parsed, ChatBatchRequest):
        return [
            messages_of([message.to_dict() for message in messages], f"messages[{index}]")
            for index, messages in enumerate(parsed.messages)
        ]
    return [messages_of(parsed.chat_messages)]


def _last_message(parsed: Any, message: Any) -> Any:
    """Of the last message the API's process needs the role, and the text only where the answer repeats it."""
    if isinstance(parsed, ChatRequest) and parsed.echo:
        return message
    return {"role": message.role, "content": ""}


def _texts(parsed: Any) -> list[Texts]:
    """The texts of a body, of each field that may have long ones."""
    match parsed:
        case CompletionRequest():
            return [Texts.of("prompt", parsed.prompt, parsed.prompts)]
        case InputFields() if parsed.messages is None:
            return [Texts.of("input", parsed.input, parsed.inputs)]
        case TokenizeRequest() if parsed.messages is None:
            return [Texts.of("prompt", parsed.prompt, [parsed.prompt or ""])]
        case DetokenizeRequest():
            return [Texts.of("tokens", parsed.tokens, [parsed.tokens])]
        case ScoreRequest():
            first, second = parsed.field_names
            return [
                Texts.of(first, getattr(parsed, first), parsed.firsts),
                Texts.of(second, getattr(parsed, second), parsed.seconds),
            ]
        case RerankRequest():
            query = Texts.of("query", parsed.query, [parsed.query])
            return [query, Texts.of("documents", parsed.documents, parsed.documents)]
        case CohereEmbedRequest():
            return [Texts.of("texts", parsed.texts, parsed.texts or [])]
    return []
