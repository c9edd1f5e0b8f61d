"""The reader of request bodies. Large ones are read in the processes of long texts (quire/engine/long_texts.py): while
JSON is decoded and converted no other thread of a process runs, each collection of garbage looks through what was made
of a body, and nothing but the end of a process bounds the processor time of one.

Such a process parses and checks the body, and encodes its messages as the process that renders the chat template gets
them. The API's process gets those bytes, which it passes on, texts and packed ids, and the rest of the body.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from quire.engine.long_texts import listed, packed
from quire.errors import UserError
from quire.server.body import parse_body, parse_request, read_body, report_ignored
from quire.server.context import ServerContext
from quire.server.disconnect import run_until_disconnect
from quire.server.errors import ApiError, ErrorDetail
from quire.server.json_bodies import in_flight
from quire.server.protocol.chat import ChatBatchRequest, ChatRequest
from quire.server.protocol.cohere import CohereEmbedRequest
from quire.server.protocol.completion import CompletionRequest
from quire.server.protocol.messages import ChatMessage, LongMessages
from quire.server.protocol.pooling import InputFields, RerankRequest, ScoreRequest
from quire.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from quire.tokenization.chat_template import PreparedConversation, prepare_conversation

LONG_BODY_BYTES = 2**20
"""Larger bodies are read elsewhere: smaller ones hold the event loop for less than the hop to a process takes."""
STAND_IN = "-"
"""Stand-in for a text that the other process keeps: no route refuses it."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRIES = msgspec.json.Decoder(list[msgspec.Raw])

T = TypeVar("T", bound=msgspec.Struct)
FoundT = TypeVar("FoundT")


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


class Problem(msgspec.Struct):
    """Of the messages, found before the template is asked for: a UserError."""

    message: str
    param: str | None


class Rejected(msgspec.Struct, tag=True):
    """The body is wrong: an ApiError."""

    status: int
    detail: ErrorDetail

    @property
    def error(self) -> ApiError:
        return ApiError(self.status, self.detail)


class Conversation(msgspec.Struct):
    """A PreparedConversation on its way."""

    messages: list[msgspec.Raw]
    final: str | None
    problem: Problem | None

    @classmethod
    def of(cls, messages: list[ChatMessage], *, continue_final_message: bool) -> Conversation:
        prepared = prepare_conversation(
            [message.to_dict() for message in messages], continue_final_message=continue_final_message
        )
        error = prepared.error
        problem = None if error is None else Problem(error.message, error.param)
        return cls(prepared.messages, prepared.final, problem)

    @property
    def prepared(self) -> PreparedConversation:
        problem = self.problem
        error = None if problem is None else UserError(problem.message, param=problem.param)
        return PreparedConversation(self.messages, self.final, error)


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
    """body: JSON, with stand-ins for what the other fields have. unknown: fields of the whole body. conversations: of
    `messages`. texts: of other fields."""

    body: bytes
    unknown: list[str]
    conversations: list[Conversation]
    texts: list[Texts]


_DECODER = msgspec.msgpack.Decoder(Found | Rejected)


async def read_request(request: Request, context: ServerContext, kind: type[T]) -> T:
    """Read and parse the body of a request; its unknown fields are logged once each, and reported in a header. Of a
    large body the process that streams never holds the parsed messages.

    Raises as `read_body` and `parse_body`, and UserError for a large body that takes READ_SECONDS of processor time.
    """
    strict = context.settings.strict_fields

    def decode(answer: bytes) -> tuple[T, list[str]] | Rejected:
        found = _DECODER.decode(answer)
        if isinstance(found, Rejected):
            return found
        parsed, _ = parse_body(found.body, kind, strict=strict)
        changes: dict[str, Any] = {texts.field: texts.value for texts in found.texts}
        if found.conversations:
            lasts = [messages[-1] for messages in _conversations(parsed)]
            pairs = zip(lasts, found.conversations, strict=True)
            long = [LongMessages(last, conversation.prepared) for last, conversation in pairs]
            changes["messages"] = long if isinstance(parsed, ChatBatchRequest) else long[0]
        return msgspec.structs.replace(parsed, **changes), found.unknown

    body = await read_body(request, context.max_body_bytes)
    found = await read_elsewhere(request, context, body, f"{__name__}:read", kind, decode)
    if found is None:
        return await parse_request(request, context, body, kind)
    if isinstance(found, Rejected):
        raise found.error
    parsed, unknown = found
    report_ignored(request, context, unknown)
    return parsed


async def read_elsewhere(
    request: Request,
    context: ServerContext,
    body: bytes,
    reader: str,
    kind: type[msgspec.Struct],
    decode: Callable[[bytes], FoundT],
) -> FoundT | None:
    """What the function `reader` of a process makes of a large body, decoded on another thread; None: the body is not
    large. Raises ClientDisconnectedError when the client hangs up first; until then the
    body counts among those that are being received, which bounds what waits here."""
    if len(body) <= LONG_BODY_BYTES:
        return None
    how = msgspec.json.encode(How.of(kind, strict=context.settings.strict_fields)).decode()
    with in_flight(request.scope):
        reading = context.engine.read_elsewhere(reader, how, body, decode)
        return await run_until_disconnect(request.receive, reading)


def read(argument: str, body: bytes) -> bytes:
    """In the other process."""
    how = msgspec.json.decode(argument, type=How)
    try:
        parsed, unknown = how.parse(body)
    except ApiError as error:
        return msgspec.msgpack.encode(Rejected(error.status, error.detail))
    fields = fields_of(body, parsed)
    texts = [each for each in _texts(parsed) if each.values]
    fields |= {each.field: each.stand_in for each in texts}
    messages = _conversations(parsed)
    if messages:
        raw = _ENTRIES.decode(fields["messages"]) if isinstance(parsed, ChatBatchRequest) else [fields["messages"]]
        lasts = [[_last_message(parsed, each, one)] for each, one in zip(messages, raw, strict=True)]
        fields["messages"] = lasts if isinstance(parsed, ChatBatchRequest) else lasts[0]
    conversations = [Conversation.of(each, continue_final_message=parsed.continue_final_message) for each in messages]
    return msgspec.msgpack.encode(Found(msgspec.json.encode(fields), unknown, conversations, texts))


def fields_of(body: bytes, parsed: msgspec.Struct) -> dict[str, Any]:
    """The fields of a body that `parsed` was made of, undecoded."""
    known = parsed.__struct_encode_fields__
    return {name: value for name, value in raw_fields(body).items() if name in known}


def raw_fields(body: bytes) -> dict[str, Any]:
    """All fields of a JSON object, undecoded. Raises msgspec.DecodeError for a body that is none."""
    return dict(_FIELDS.decode(body))


def _conversations(parsed: Any) -> list[list[ChatMessage]]:
    """The messages of each conversation of a body; empty where it has none."""
    if getattr(parsed, "messages", None) is None:
        return []
    if isinstance(parsed, ChatBatchRequest):
        return parsed.messages
    if isinstance(parsed, ChatRequest):
        with contextlib.suppress(UserError):  # the answer raises the same, before it comes to the template
            return [parsed.with_tools.messages]
    return [parsed.messages]


def _last_message(parsed: Any, messages: list[ChatMessage], raw: msgspec.Raw) -> Any:
    """Of the last message the API's process needs the role, and the text only where the answer repeats it. raw: the
    messages as they came."""
    if isinstance(parsed, ChatRequest) and parsed.echo:
        return _ENTRIES.decode(raw)[-1]
    return {"role": messages[-1].role, "content": ""}


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
