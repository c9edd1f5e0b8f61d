"""Messages of a conversation in requests of chat completions and tokenize."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from quire.errors import UserError
from quire.multimodal.sources import picture_of
from quire.server.fields import near_miss
from quire.server.protocol.common import ShortString
from quire.server.protocol.foreign import MESSAGE_NO_EFFECT
from quire.tokenization import conversation
from quire.tokenization.conversation import ROLES_WITHOUT_CONTENT, TEXT_OF_PART, check_type, text_of_part

MAX_MESSAGES = 4096
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


MAX_ROLE = 64


def check_role(role: str) -> None:
    """Raise UserError for a role of invalid length or a misspelled one."""
    if not 1 <= len(role) <= MAX_ROLE:
        raise UserError(f"a role has 1 to {MAX_ROLE} characters", param="role")
    if role not in KNOWN_ROLES and (meant := near_miss(role, KNOWN_ROLES)) is not None:
        raise UserError(f"unknown role {role!r}; did you mean {meant!r}?", param="role")


class ContentPart(msgspec.Struct, frozen=True, gc=False):
    """Part of a message: text or image. `messages_of` refuses other kinds by name."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: Any = None
    detail: str | None = None
    uuid: Any = None
    image_embeds: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    file: Any = None

    NO_EFFECT: ClassVar[frozenset[str]] = MESSAGE_NO_EFFECT | {"closed"}

    def __post_init__(self) -> None:
        if self.type == "image_url" and isinstance(self.image_url, str):
            raise UserError("image_url must be an object with a url, not a string", param="image_url")
        for other in _MEDIA:
            if self.type in TEXT_OF_PART and getattr(self, other) is not None:
                raise UserError(f"{other} does not belong into a content part of type {self.type!r}", param=other)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


_MEDIA = ("image_url", "image_embeds", "input_audio", "audio_url", "video_url", "file")


class CalledFunction(msgspec.Struct, frozen=True, gc=False):
    """Function of an earlier call. arguments: an object, or its JSON."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(msgspec.Struct, frozen=True, gc=False):
    """Earlier tool call in an assistant's message of a request."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"

    NO_EFFECT: ClassVar[frozenset[str]] = MESSAGE_NO_EFFECT | {"extra_content"}

    def __post_init__(self) -> None:
        check_type(self.type, ("function",), "tool calls")

    def to_dict(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(msgspec.Struct, frozen=True, gc=False):
    """One message. Fields that servers add to answers (`refusal`, `annotations`, ...) may return, without effect.

    role: any that the template knows. reasoning, reasoning_content: two names of the assistant's reasoning. tools: part
        of a developer's message. task: passed to the template. function_call: OpenAI's old `tool_calls`.
    """

    role: str
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
        check_role(self.role)
        if self.content is None and self.role not in ROLES_WITHOUT_CONTENT:
            raise UserError("content is required", param="content")

    @property
    def text(self) -> str:
        content = self.to_dict()["content"] or ""
        if isinstance(content, str):
            return content
        return "\n".join(text_of_part(part, "content") for part in content if picture_of(part, "content") is None)

    def to_dict(self) -> dict[str, Any]:
        """Message as `messages_of` reads it, a chat completion's."""
        content: Any = self.content
        if isinstance(content, list):
            content = [part if isinstance(part, str) else part.to_dict() for part in content]
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


class ReadMessages(list[Any]):
    """Messages of a parsed body (quire/server/reading.py): `found` has all of them; the list has only the last, for a
    large body, without its text unless the answer repeats it."""

    def __init__(self, last: Any, found: conversation.Messages) -> None:
        super().__init__([last])
        self.found = found


def found_messages(messages: list[Any] | None) -> conversation.Messages:
    """Messages of a body that `read_request` has read."""
    assert isinstance(messages, ReadMessages)
    return messages.found


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


def with_tool_calls(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Replace `function_call` by `tool_calls`, and function messages by tool messages. The ids have the length that
    Mistral's templates require."""
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
    return found


def check_continuation(
    add_generation_prompt: bool | None, continue_final_message: bool, messages: list[ChatMessage]
) -> None:
    """Raise UserError if the last message cannot be continued as requested."""
    if not continue_final_message:
        return
    if add_generation_prompt:
        raise UserError(
            "continue_final_message and add_generation_prompt exclude one another", param="continue_final_message"
        )
    if messages[-1].role != "assistant":
        raise UserError("continue_final_message needs a last message of the assistant", param="continue_final_message")
