"""Large request bodies are read in the processes of long texts (quire/engine/long_texts.py): while JSON is decoded and
converted no other thread of a process runs, and each collection of garbage looks through what was made of a body.

Such a process parses and checks the body, and encodes its messages as the process that renders the chat template gets
them. The API's process gets those bytes, which it passes on, prompts as texts or packed ids, and the rest of the body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
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
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completion import CompletionRequest
from quire.server.protocol.messages import ChatMessage, LongMessages
from quire.server.protocol.pooling import ClassificationRequest, EmbeddingRequest, InputFields, PoolingRequest
from quire.server.protocol.tokenize import TokenizeRequest
from quire.tokenization.chat_template import PreparedConversation, prepare_conversation

LONG_BODY_BYTES = 2**20
"""Larger bodies are read elsewhere: smaller ones hold the event loop for less than the hop to a process takes."""
STAND_IN = "-"
"""Stand-in for a text that the other process keeps: no route refuses it."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRIES = msgspec.json.Decoder(list[msgspec.Raw])
_KINDS: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind
    for kind in (
        ChatRequest,
        CompletionRequest,
        TokenizeRequest,
        EmbeddingRequest,
        PoolingRequest,
        ClassificationRequest,
    )
}
"""The structs of bodies that `read` knows."""

T = TypeVar("T", bound=msgspec.Struct)
FoundT = TypeVar("FoundT")


class How(msgspec.Struct):
    """How the other process reads a body. kind: name of the struct; strict: under --strict-fields."""

    kind: str
    strict: bool


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
    """field: of the body. is_one: the field is a text itself, and no list."""

    field: str
    values: list[Text]
    is_one: bool

    @property
    def value(self) -> str | list[str | list[int]]:
        found = [each.text if each.ids is None else listed(each.ids) for each in self.values]
        return found[0] if self.is_one else found  # type: ignore[return-value]


class Found(msgspec.Struct, tag=True):
    """body: JSON, with stand-ins for what the other fields have. unknown: fields of the whole body."""

    body: bytes
    unknown: list[str]
    conversation: Conversation | None
    texts: Texts | None


_DECODER = msgspec.msgpack.Decoder(Found | Rejected)


async def read_long_request(request: Request, context: ServerContext, kind: type[T]) -> T:
    """As `read_request`: of a large body the process that streams never holds the parsed messages."""
    strict = context.settings.strict_fields

    def decode(answer: bytes) -> tuple[T, list[str]] | Rejected:
        found = _DECODER.decode(answer)
        if isinstance(found, Rejected):
            return found
        parsed, _ = parse_body(found.body, kind, strict=strict)
        changes: dict[str, Any] = {}
        if found.conversation is not None:
            changes["messages"] = LongMessages(parsed.messages[-1], found.conversation.prepared)  # type: ignore[attr-defined]
        elif found.texts is not None:
            changes[found.texts.field] = found.texts.value
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
    large, or there are no processes. Raises ClientDisconnectedError when the client hangs up first; until then the
    body counts among those that are being received, which bounds what waits here."""
    if len(body) <= LONG_BODY_BYTES:
        return None
    how = msgspec.json.encode(How(kind.__name__, context.settings.strict_fields)).decode()
    with in_flight(request.scope):
        reading = context.engine.read_elsewhere(reader, how, body, decode)
        return await run_until_disconnect(request.receive, reading)


def read(argument: str, body: bytes) -> bytes:
    """In the other process."""
    how = msgspec.json.decode(argument, type=How)
    try:
        parsed, unknown = parse_body(body, _KINDS[how.kind], strict=how.strict)
    except ApiError as error:
        return msgspec.msgpack.encode(Rejected(error.status, error.detail))
    fields = fields_of(body, parsed)
    if (conversation := _conversation(parsed)) is not None:
        fields["messages"] = [_last_message(parsed, fields["messages"])]
        return msgspec.msgpack.encode(Found(msgspec.json.encode(fields), unknown, conversation, None))
    texts = _texts(parsed)
    fields[texts.field] = STAND_IN if texts.values[0].ids is None else [0]
    return msgspec.msgpack.encode(Found(msgspec.json.encode(fields), unknown, None, texts))


def fields_of(body: bytes, parsed: msgspec.Struct) -> dict[str, Any]:
    """The fields of a body that `parsed` was made of, undecoded."""
    known = parsed.__struct_encode_fields__
    return {name: value for name, value in raw_fields(body).items() if name in known}


def raw_fields(body: bytes) -> dict[str, Any]:
    """All fields of a JSON object, undecoded. Raises msgspec.DecodeError for a body that is none."""
    return dict(_FIELDS.decode(body))


def _conversation(parsed: Any) -> Conversation | None:
    if (messages := parsed.messages if hasattr(parsed, "messages") else None) is None:
        return None
    if isinstance(parsed, ChatRequest):
        with contextlib.suppress(UserError):  # the answer raises the same, before it comes to the template
            messages = parsed.with_tools.messages
    return Conversation.of(messages, continue_final_message=parsed.continue_final_message)


def _last_message(parsed: Any, messages: msgspec.Raw) -> Any:
    """Of the last message the API's process needs the role, and the text only where the answer repeats it."""
    if isinstance(parsed, ChatRequest) and parsed.echo:
        return _ENTRIES.decode(messages)[-1]
    return {"role": parsed.messages[-1].role, "content": ""}


def _texts(parsed: Any) -> Texts:
    match parsed:
        case CompletionRequest():
            field, values = "prompt", parsed.prompts
        case InputFields():
            field, values = "input", parsed.inputs
        case _:
            field, values = "prompt", [parsed.prompt]
    found = [Text(value) if isinstance(value, str) else Text(ids=packed(value)) for value in values]
    return Texts(field, found, isinstance(getattr(parsed, field), str))
