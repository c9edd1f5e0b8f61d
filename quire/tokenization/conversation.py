"""A conversation, as every API hands it over: messages of parts, tools, and what else the chat template is given.

`messages_of` is the only place that makes messages, and that refuses what a part may not be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from quire.errors import UserError
from quire.multimodal.inputs import NO_OPTIONS, MediaOptions
from quire.multimodal.sources import Picture, picture_of
from quire.utils.frames import encode

ROLES_WITHOUT_CONTENT = ("assistant", "tool", "function")
"""Roles whose messages may have no content: a call of a tool has no text, and its result may be empty."""
TEXT_OF_PART = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a content part -> the field with its text."""
ContentFormat = Literal["auto", "string", "openai"]
"""How a template gets the content of messages: as a string, as a list of parts, or as it asks for it."""


T = TypeVar("T")


IMAGE = "image"
"""Type of a Part that stands for an image."""


class Part(msgspec.Struct, frozen=True, gc=False):
    """A part of a message. type: "text", or IMAGE: its text is empty, and the image is with the conversation."""

    type: str
    text: str


class Message(msgspec.Struct):
    """A message. fields: what the template is given besides role and content (calls of tools, thoughts, names)."""

    role: str
    content: list[Part] | None
    fields: dict[str, Any]


class Messages(msgspec.Struct, frozen=True):
    """The messages of one conversation, `number` of them, each as msgpack of a Message. pictures: those that parts
    stand for, in their order."""

    encoded: memoryview
    number: int
    pictures: list[Picture] = []


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation to be written by a chat template.

    add_generation_prompt: end with the beginning of an answer. continue_final_message: end inside the last message
    instead, so that it is continued. documents, variables: for templates that know them. source: of a template to take
    instead of the model's. add_special_tokens: the tokenizer adds what it puts around a text. media: how
    its images are taken.
    """

    messages: Messages
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = {}
    source: str | None = None
    content_format: ContentFormat = "auto"
    add_special_tokens: bool = False
    media: MediaOptions = NO_OPTIONS


def conversation_of(
    messages: Sequence[Mapping[str, Any]], *, chat_template_kwargs: Mapping[str, Any] | None = None, **options: Any
) -> Conversation:
    """A conversation of messages as `messages_of` takes them from a program. options: the other fields of a
    Conversation."""
    found = messages_of(messages, takes_objects=True)
    return Conversation(messages=found, variables=chat_template_kwargs or {}, **options)


def messages_of(
    given: Sequence[Mapping[str, Any]], where: str = "messages", *, takes_objects: bool = False
) -> Messages:
    """The messages of a conversation. Each is an object with a role, a content (a string, a list of parts or None) and
    whatever else the template knows. where: the list's path in the request, for errors. takes_objects: parts may hold
    images as a program has them.

    Raises UserError with the path of the field that is wrong."""
    pictures: list[Picture] = []

    def part_of(part: Any, path: str) -> Part:
        picture = picture_of(part, path, takes_objects=takes_objects)
        if picture is None:
            return Part("text", text_of_part(part, path))
        pictures.append(picture)
        return Part(IMAGE, "")

    messages = [_message(message, f"{where}[{index}]", part_of) for index, message in enumerate(given)]
    if not messages:
        raise UserError(f"{where} must hold at least one message", param=where)
    return Messages(memoryview(written(encode, messages, where)), len(messages), pictures)


def text_of_part(part: Any, where: str) -> str:
    """The text of a part as a request has it: a string, or an object with a type. Raises UserError with the path."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise UserError(f"{where}: a content part must be a string or an object, not {part!r:.100}", param=where)
    kind = part.get("type")
    if kind is None:
        raise UserError(f"{where}: a content part needs a type", param=f"{where}.type")
    check_type(kind, TEXT_OF_PART, f"{where}: content parts")
    name = TEXT_OF_PART[kind]
    text = part.get(name)
    if not isinstance(text, str):
        raise UserError(f"{where}: a content part of type {kind!r} needs a {name}", param=f"{where}.{name}")
    return text


def decoded_arguments(arguments: Any, where: str) -> Any:
    """The object that the JSON of a call's arguments is; what is no text stays as it is. Raises UserError."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return msgspec.json.decode(arguments) if arguments.strip() else {}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON: {error}", param=where) from None


def check_type(kind: Any, known: Collection[str], what: str) -> None:
    """Raise UserError for a type of parts, items, tools or calls (`what`) that is not among `known`. `what` may begin
    with the path of the object, before a colon."""
    if not isinstance(kind, str) or kind not in known:
        path, separator, _ = what.rpartition(": ")
        listed = ", ".join(map(repr, known))
        verb = "is" if len(known) == 1 else "are"
        param = f"{path}.type" if separator else "type"
        raise UserError(f"{what} of type {kind!r:.100} are not supported (only {listed} {verb})", param=param)


def written(write: Callable[[Any], T], value: Any, where: str = "messages") -> T:
    """What `write` makes of a value. Raises UserError for a value that msgpack does not have."""
    try:
        return write(value)
    except UnicodeEncodeError as error:
        what = f"lone surrogate at position {error.start}"
        raise UserError(f"{where} is not valid Unicode: {what}", param=where) from None
    except RecursionError:
        raise UserError(f"{where} are nested too deeply", param=where) from None
    except (TypeError, OverflowError) as error:
        raise UserError(f"{where} hold what a chat template cannot be given: {error}", param=where) from None


def _message(message: Any, where: str, part_of: Callable[[Any, str], Part]) -> Message:
    """Calls of tools have their arguments decoded, and what the assistant thought stands under both of its names."""
    if not isinstance(message, Mapping):
        raise UserError(f"{where} must be an object with role and content", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UserError(f"{where} needs a role", param=f"{where}.role")
    fields = {name: value for name, value in message.items() if name not in ("role", "content")}
    if role == "assistant":
        calls = fields.pop("tool_calls", None)
        if calls:
            fields["tool_calls"] = [_decoded_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
        reasoning = fields.get("reasoning")
        reasoning = fields.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            fields["reasoning"] = fields["reasoning_content"] = reasoning
    return Message(role, _content(message.get("content"), role, where, part_of), fields)


def _content(content: Any, role: str, where: str, part_of: Callable[[Any, str], Part]) -> list[Part] | None:
    if isinstance(content, str):
        return [Part("text", content)]
    if isinstance(content, list | tuple):
        path = f"{where}.content"
        return [part_of(part, f"{path}[{index}]") for index, part in enumerate(content)]
    if content is not None:
        raise UserError(f"{where}: content must be a string or a list of parts", param=f"{where}.content")
    if role not in ROLES_WITHOUT_CONTENT:
        raise UserError(f"{where} needs content", param=f"{where}.content")
    return None


def _decoded_call(call: Any, where: str) -> dict[str, Any]:
    """A call of a tool whose arguments are an object, as templates expect them; clients send its JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise UserError(f"{where} needs a function", param=where)
    arguments = decoded_arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}
