"""Conversation in all APIs' common form: messages, tools, and other template inputs. Only `messages_of` makes messages
and refuses invalid parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from quire.errors import UserError
from quire.multimodal.inputs import NO_OPTIONS, MediaOptions
from quire.multimodal.sources import Picture, picture_of
from quire.utils.frames import encode

ROLES_WITHOUT_CONTENT = ("assistant", "tool", "function")
"""Roles whose messages may lack content."""
TEXT_OF_PART = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a content part -> field with its text."""
ContentFormat = Literal["auto", "string", "openai"]
"""Form of message content for a template: a string, a list of parts, or as the template asks."""


T = TypeVar("T")


IMAGE, VIDEO = "image", "video"
"""Types of a MessagePart that stands for an image or a video."""


class MessagePart(msgspec.Struct, frozen=True, gc=False):
    """Part of a message. type: "text", or IMAGE or VIDEO, with empty text; the conversation has the picture."""

    type: str
    text: str


class Message(msgspec.Struct):
    """Message of a conversation. fields: template inputs besides role and content (tool calls, reasoning, names)."""

    role: str
    content: list[MessagePart] | None
    fields: dict[str, Any]


class Messages(msgspec.Struct, frozen=True):
    """Messages of one conversation, `number` in all, each as msgpack of a Message. pictures: images of the parts, in
    order."""

    encoded: memoryview
    number: int
    pictures: list[Picture] = []


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Conversation for a chat template.

    add_generation_prompt: end with an answer's start. continue_final_message: end inside the last message. documents,
    variables: further template inputs. source: template instead of the model's. add_special_tokens: let the tokenizer
    add its special tokens. media: image options.
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
    """Make a conversation from a program's messages, see `messages_of`. options: other fields of Conversation."""
    found = messages_of(messages, takes_objects=True)
    return Conversation(messages=found, variables=chat_template_kwargs or {}, **options)


def messages_of(
    given: Sequence[Mapping[str, Any]], where: str = "messages", *, takes_objects: bool = False
) -> Messages:
    """Make the messages of a conversation from objects with a role, a content (a string, a list of parts or None) and
    fields for the template. takes_objects: parts may hold image objects. Raises UserError with the path.
    """
    pictures: list[Picture] = []

    def part_of(part: Any, path: str) -> MessagePart:
        picture = picture_of(part, path, takes_objects=takes_objects)
        if picture is None:
            return MessagePart("text", text_of_part(part, path))
        pictures.append(picture)
        return MessagePart(VIDEO if picture.is_video else IMAGE, "")

    messages = [_message(message, f"{where}[{index}]", part_of) for index, message in enumerate(given)]
    if not messages:
        raise UserError(f"{where} must hold at least one message", param=where)
    return Messages(memoryview(written(encode, messages, where)), len(messages), pictures)


def text_of_part(part: Any, where: str) -> str:
    """Text of a request's part: string, or an object with a type. Raises UserError with the path."""
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
    """Decode the JSON of a call's arguments; None and blank text become {}, other types stay unchanged. Raises
    UserError."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return msgspec.json.decode(arguments) if arguments.strip() else {}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON: {error}", param=where) from None


def check_type(kind: Any, known: Collection[str], what: str) -> None:
    """Raise UserError for an unknown type. what: plural noun for the message, optionally after the object's path and a
    colon."""
    if not isinstance(kind, str) or kind not in known:
        path, separator, _ = what.rpartition(": ")
        listed = ", ".join(map(repr, known))
        verb = "is" if len(known) == 1 else "are"
        param = f"{path}.type" if separator else "type"
        raise UserError(f"{what} of type {kind!r:.100} are not supported (only {listed} {verb})", param=param)


def written(write: Callable[[Any], T], value: Any, where: str = "messages") -> T:
    """Encode a client's value with `write`. Raises UserError for a value that msgpack cannot encode."""
    try:
        return write(value)
    except UnicodeEncodeError as error:
        what = f"lone surrogate at position {error.start}"
        raise UserError(f"{where} is not valid Unicode: {what}", param=where) from None
    except RecursionError:
        raise UserError(f"{where} are nested too deeply", param=where) from None
    except (TypeError, OverflowError) as error:
        raise UserError(f"{where} hold what a chat template cannot be given: {error}", param=where) from None


def _message(message: Any, where: str, part_of: Callable[[Any, str], MessagePart]) -> Message:
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


def _content(
    content: Any, role: str, where: str, part_of: Callable[[Any, str], MessagePart]
) -> list[MessagePart] | None:
    if isinstance(content, str):
        return [MessagePart("text", content)]
    if isinstance(content, list | tuple):
        path = f"{where}.content"
        return [part_of(part, f"{path}[{index}]") for index, part in enumerate(content)]
    if content is not None:
        raise UserError(f"{where}: content must be a string or a list of parts", param=f"{where}.content")
    if role not in ROLES_WITHOUT_CONTENT:
        raise UserError(f"{where} needs content", param=f"{where}.content")
    return None


def _decoded_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise UserError(f"{where} needs a function", param=where)
    arguments = decoded_arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}
