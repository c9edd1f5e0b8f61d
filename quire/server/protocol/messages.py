"""The messages of a conversation, as clients send them: chat completions and tokenize."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from quire.errors import UserError
from quire.server.fields import near_miss
from quire.server.protocol.common import ShortString
from quire.server.protocol.foreign import MESSAGE_NO_EFFECT
from quire.tokenization.chat_template import ROLES_WITHOUT_CONTENT, TEXT_OF_PART, PreparedConversation

MAX_MESSAGES = 4096
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ContentPart(msgspec.Struct, frozen=True, gc=False):
    """A part of a message. Only parts with a text are supported; the others are known so that they can be named."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: Any = None
    image_embeds: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    file: Any = None

    NO_EFFECT: ClassVar[frozenset[str]] = MESSAGE_NO_EFFECT | {"closed", "detail", "uuid"}

    def __post_init__(self) -> None:
        if self.type is None:
            raise UserError("a content part needs a type", param="type")
        if (name := TEXT_OF_PART.get(self.type)) is None:
            known = ", ".join(repr(kind) for kind in TEXT_OF_PART)
            raise UserError(f"content parts of type {self.type!r} are not supported (only {known} are)", param="type")
        if getattr(self, name) is None:
            raise UserError(f"a content part of type {self.type!r} needs a {name}", param=name)
        for other in self.__struct_fields__[4:]:
            if getattr(self, other) is not None:
                raise UserError(f"{other} does not belong into a content part of type {self.type!r}", param=other)

    @property
    def content(self) -> str:
        assert self.type is not None
        text = getattr(self, TEXT_OF_PART[self.type])
        assert isinstance(text, str)
        return text


class CalledFunction(msgspec.Struct, frozen=True, gc=False):
    """arguments: JSON of an object, or the object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(msgspec.Struct, frozen=True, gc=False):
    """A call that the assistant made in an earlier turn."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"

    NO_EFFECT: ClassVar[frozenset[str]] = MESSAGE_NO_EFFECT | {"extra_content"}

    def __post_init__(self) -> None:
        if self.type != "function":
            raise UserError(f"tool calls of type {self.type!r} are not supported (only 'function' is)", param="type")

    def to_dict(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(msgspec.Struct, frozen=True, gc=False):
    """One message. What servers add to their answers (`refusal`, `annotations`, ...) may come back, without effect.

    role: any that the template knows. reasoning, reasoning_content: two names of the assistant's thoughts.
    tools: of a developer's message; task: a template's own; both are given to the template. function_call: OpenAI's
    former `tool_calls`.
    """

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart | str] | None = None
    name: ShortString | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: ShortString | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tools: list[dict[str, Any]] | None = None
    task: ShortString | None = None
    function_call: CalledFunction | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = MESSAGE_NO_EFFECT

    def __post_init__(self) -> None:
        if self.role not in KNOWN_ROLES and (meant := near_miss(self.role, KNOWN_ROLES)) is not None:
            raise UserError(f"unknown role {self.role!r}; did you mean {meant!r}?", param="role")
        if self.content is None and self.role not in ROLES_WITHOUT_CONTENT:
            raise UserError("content is required", param="content")

    @property
    def size(self) -> int:
        """What `to_dict` and the template have to join: characters of texts, and 64 for each of several parts."""
        content = self.content or ""
        size = len(content) if isinstance(content, str) else 64 * len(content)
        calls = [call.function for call in self.tool_calls or ()]
        for function in calls if self.function_call is None else [*calls, self.function_call]:
            size += 64 + (len(function.arguments) if isinstance(function.arguments, str) else 0)
        return size

    @property
    def text(self) -> str:
        """The content as a string."""
        if isinstance(self.content, list):
            return "\n".join(part if isinstance(part, str) else part.content for part in self.content)
        return self.content or ""

    def to_dict(self) -> dict[str, Any]:
        """What ChatTemplate is given."""
        content: str | list[dict[str, str]] | None
        if isinstance(self.content, list):
            texts = (part if isinstance(part, str) else part.content for part in self.content)
            content = [{"type": "text", "text": text} for text in texts]
        else:
            content = self.content
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.role == "assistant":
            calls = self.tool_calls or []
            if self.function_call is not None and not calls:
                calls = [MessageToolCall(self.function_call)]
            if calls:
                message["tool_calls"] = [call.to_dict() for call in calls]
            if (reasoning := self.reasoning_content if self.reasoning is None else self.reasoning) is not None:
                message["reasoning"] = reasoning
        if self.role == "developer" and self.tools is not None:
            message["tools"] = self.tools
        for name in ("name", "tool_call_id", "task"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message


class LongMessages(list[ChatMessage]):
    """The messages of a large body, which another process has read (quire/server/long_bodies.py): all of them are in
    `conversation`, the last one alone is in the list, without its text unless the answer repeats that."""

    def __init__(self, last: ChatMessage, conversation: PreparedConversation) -> None:
        super().__init__([last])
        self.conversation = conversation


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


def with_tool_calls(messages: list[ChatMessage]) -> list[ChatMessage]:
    """The messages with `tool_calls` for `function_call`, and messages of a tool for those of a function. The ids are
    as long as Mistral's templates want them."""
    found = []
    number = 0
    for message in messages:
        if message.function_call is not None:
            number += 1
            call = MessageToolCall(message.function_call, f"call{number:05}")
            message = msgspec.structs.replace(message, tool_calls=[call], function_call=None)
        elif message.role == "function":
            message = msgspec.structs.replace(message, role="tool", tool_call_id=f"call{number:05}")
        found.append(message)
    return LongMessages(found[-1], messages.conversation) if isinstance(messages, LongMessages) else found


def check_continuation(
    add_generation_prompt: bool | None, continue_final_message: bool, messages: list[ChatMessage]
) -> None:
    """Raise UserError when the last message can not be continued as asked."""
    if not continue_final_message:
        return
    if add_generation_prompt:
        raise UserError(
            "continue_final_message and add_generation_prompt exclude one another", param="continue_final_message"
        )
    if messages[-1].role != "assistant":
        raise UserError("continue_final_message needs a last message of the assistant", param="continue_final_message")
