"""POST /v1/chat/completions."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.errors import UserError
from quire.sampling_params import SamplingParams
from quire.server.protocol.common import UNSUPPORTED_FIELDS, Int32, PromptLogprobs, SamplingFields, ShortString, Usage

MAX_MESSAGES = 4096

ROLES = ("system", "developer", "user", "assistant")

UNSUPPORTED_CHAT_FIELDS: dict[str, tuple[object, ...]] = {
    **UNSUPPORTED_FIELDS,
    "audio": (),
    "best_of": (1,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message. Only text parts are supported; the other kinds are known so that they can be named."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    audio_url: Any = None
    file: Any = None
    rejected: Any = None

    def __post_init__(self) -> None:
        if self.type != "text":
            raise UserError(f"content parts of type {self.type!r} are not supported (only 'text' is)", param="type")
        if self.text is None:
            raise UserError("a content part of type 'text' needs a text", param="text")
        for name in self.__struct_fields__[2:]:
            if getattr(self, name) is not None:
                raise UserError(f"{name} does not belong into a content part of type 'text'", param=name)


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message. Fields of tool calls and audio are known, so that they can be named when refused."""

    role: str
    content: str | list[ContentPart] | None = None
    name: ShortString | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: Any = None
    rejected: Any = None
    annotations: Any = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise UserError(f"role must be one of {', '.join(ROLES)}, not {self.role!r}", param="role")
        for name in ("tool_calls", "tool_call_id", "function_call", "audio", "rejected", "annotations"):
            if getattr(self, name) not in (None, []):
                raise UserError(f"{name} is not supported by this server", param=name)
        if self.content is None:
            raise UserError("content is required", param="content")

    @property
    def size(self) -> int:
        """What `to_dict` has to join: characters of a text, or 64 for each of several parts."""
        content = self.content or ""
        return len(content) if isinstance(content, str) else 64 * len(content)

    def to_dict(self) -> dict[str, str]:
        """What the chat template sees. `developer` is today's name of `system`; templates know the older one."""
        assert self.content is not None
        text = self.content if isinstance(self.content, str) else "\n".join(part.text or "" for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.name is not None:
            message["name"] = self.name
        return message


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(SamplingFields, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """max_completion_tokens: what used to be max_tokens. logprobs: whether; top_logprobs: how many alternatives."""

    messages: Messages
    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    logprobs: bool = False
    top_logprobs: Int32 | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = UNSUPPORTED_CHAT_FIELDS

    def __post_init__(self) -> None:
        self.check_stream_options()
        if self.top_logprobs is not None and not self.logprobs:
            raise UserError("top_logprobs is only allowed together with logprobs", param="top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) == 2:
            raise UserError("max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
        check_continuation(self.add_generation_prompt, self.continue_final_message, self.messages)

    @property
    def generation_prompt(self) -> bool:
        return self.add_generation_prompt is not False and not self.continue_final_message

    @property
    def special_tokens(self) -> bool:
        return self.add_special_tokens

    def to_sampling_params(self) -> SamplingParams:
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        try:
            return self.sampling_params(max_tokens=limit, logprobs=logprobs)
        except UserError as error:
            raise self._in_wire_words(error) from None

    def _in_wire_words(self, error: UserError) -> UserError:
        """`error` with the client's name for a field that SamplingParams words differently."""
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        message = re.sub("|".join(rf"\b{name}\b" for name in names), lambda found: names[found[0]], error.message)
        return UserError(message, param=names.get(error.param or "", error.param))


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


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    rejected: None = None


class AssistantMessage(msgspec.Struct):
    role: str
    content: str
    rejected: None = None


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
