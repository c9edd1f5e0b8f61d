"""Bodies of Anthropic's Messages API, and their conversion to chat completions."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quire.errors import UserError
from quire.multimodal.sources import Picture, read_base64
from quire.server.protocol.common import Identifier, Int32, Priority, ShortString
from quire.server.protocol.foreign import MESSAGE_NO_EFFECT
from quire.server.protocol.messages import MAX_MESSAGES
from quire.tokenization.conversation import check_type

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Chat endpoint's field names -> Anthropic's, for errors."""

PASSED_ON = ("model", "max_tokens", "temperature", "top_p", "top_k", "chat_template_kwargs", "request_id", "priority")
"""Fields with the same name at the chat endpoint; the last three are extensions."""

_BLOCK_NO_EFFECT = MESSAGE_NO_EFFECT | {"caller", "context", "title", "toolset_name"}


_NEEDED = {
    "text": "text",
    "image": "source",
    "thinking": "thinking",
    "tool_use": "name",
    "tool_result": "tool_use_id",
}
"""Type of a block -> its required field."""


class Source(msgspec.Struct, frozen=True):
    """Source of an image: base64 of its file, or a URL."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = MESSAGE_NO_EFFECT

    def picture(self, where: str) -> Picture:
        """Image of this source. Raises UserError for an unsupported source or invalid data."""
        check_type(self.type, ("base64", "url"), f"{where}: sources of images")
        if self.type == "url":
            return Picture.of_url(self.url, f"{where}.url")
        if self.data is None:
            raise UserError(f"{where}: a source of type 'base64' needs data", param=f"{where}.data")
        return Picture(f"{where}.data", read_base64(self.data, f"{where}.data"))


class Block(msgspec.Struct, frozen=True):
    """Block of a message: text, image, thinking, tool_use or tool_result. Others are refused when messages are made."""

    type: str
    text: str | None = None
    thinking: str | None = None
    data: str | None = None
    id: ShortString | None = None
    name: ShortString | None = None
    input: dict[str, Any] | None = None
    tool_use_id: ShortString | None = None
    content: str | list[Block] | None = None
    is_error: bool = False
    source: Source | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = _BLOCK_NO_EFFECT

    def __post_init__(self) -> None:
        name = _NEEDED.get(self.type)
        if name is not None and getattr(self, name) is None:
            raise UserError(f"a block of type {self.type!r} needs a {name}", param=name)


class AnthropicMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    NO_EFFECT: ClassVar[frozenset[str]] = MESSAGE_NO_EFFECT

    @property
    def blocks(self) -> list[Block]:
        return [Block("text", self.content)] if isinstance(self.content, str) else self.content


class AnthropicTool(msgspec.Struct, frozen=True):
    """Tool of the client. Anthropic's server tools have other types."""

    name: ShortString
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {"allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples"}
    )

    def __post_init__(self) -> None:
        if self.type is not None:
            check_type(self.type, ("custom",), "tools")
        if self.input_schema is None:
            raise UserError("a tool needs an input_schema", param="input_schema")

    def to_chat(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": {name: v for name, v in function.items() if v is not None}}


class AnthropicToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: ShortString | None = None
    disable_parallel_tool_use: bool = False

    def to_chat(self) -> str | dict[str, Any]:
        if self.type != "tool":
            return {"auto": "auto", "any": "required", "none": "none"}[self.type]
        if self.name is None:
            raise UserError("a tool_choice of type 'tool' needs a name", param="tool_choice.name")
        return {"type": "function", "function": {"name": self.name}}


class Thinking(msgspec.Struct, frozen=True):
    """Thinking option. budget_tokens: maximum thinking tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int32 | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"display"})


class OutputFormat(msgspec.Struct, frozen=True):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct, frozen=True):
    effort: ShortString | None = None
    format: OutputFormat | None = None

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {"task_budget": ()}


class CountTokensRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Conversation whose tokens are counted. system: text, or blocks of text."""

    model: str
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {
            "billing_policy",
            "cache_control",
            "diagnostics",
            "fallback_credit_token",
            "fallbacks",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    )
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "compaction": (),
        "container": (),
        "context_management": ({},),
        "mcp_servers": ([],),
        "thread": (),
    }

    def ignored(self, *, reasons: bool) -> list[str]:
        """Given fields without effect. reasons: server separates the model's reasoning."""
        budget = self.thinking is not None and self.thinking.budget_tokens is not None
        return ["thinking.budget_tokens"] if budget and not reasons else []

    def to_chat(self, *, reasons: bool = False) -> dict[str, Any]:
        """Body of the chat completion, without messages. reasons: server separates the model's reasoning. Raises
        UserError."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in PASSED_ON if getattr(self, name, None)}
        if self.messages[-1].role == "assistant":  # the answer's beginning
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        if self.tools:
            fields["tools"] = [tool.to_chat() for tool in self.tools]
        if self.tool_choice is not None and (self.tools or self.tool_choice.type != "auto"):
            fields["tool_choice"] = self.tool_choice.to_chat()
            if self.tool_choice.disable_parallel_tool_use:
                fields["parallel_tool_calls"] = False
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            fields["chat_template_kwargs"] = {
                "enable_thinking": thinks,
                "thinking": thinks,
                **self.chat_template_kwargs,
            }
            if self.thinking.budget_tokens is not None and reasons:
                fields["thinking_token_budget"] = self.thinking.budget_tokens
        config = self.output_config or OutputConfig()
        if config.effort is not None:
            fields["reasoning_effort"] = config.effort
        if (form := config.format or self.output_format) is not None:
            schema = {"name": "answer", "schema": form.schema, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    @property
    def chat_messages(self) -> list[dict[str, Any]]:
        """Chat-completion messages of the request, the system prompt first. Raises UserError."""
        found: list[dict[str, Any]] = []
        if self.system:
            found.append({"role": "system", "content": _texts(self.system, "system")})
        for index, message in enumerate(self.messages):
            where = f"messages[{index}].content"
            if message.role == "assistant":
                found.append(_assistant(message, where))
            else:
                found += _user(message, where)
        return found


class MessagesRequest(CountTokensRequest, kw_only=True, frozen=True):
    """Conversation to answer, with Anthropic's fields and `chat_template_kwargs`, `request_id` and `priority`."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    request_id: Identifier | None = None
    priority: Priority = 0

    def to_chat(self, *, reasons: bool = False) -> dict[str, Any]:
        fields = super().to_chat(reasons=reasons)
        for name in ("temperature", "top_p", "top_k"):  # 0 counts as given
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        if self.stop_sequences:
            fields["stop"] = self.stop_sequences
        return fields


def _texts(content: str | list[Block], where: str) -> str | list[dict[str, str] | Picture]:
    if isinstance(content, str):
        return content
    _check_blocks(content, ("text",), where)
    return _parts(enumerate(content), where)


def _parts(blocks: Iterable[tuple[int, Block]], where: str) -> list[dict[str, str] | Picture]:
    found: list[dict[str, str] | Picture] = []
    for index, block in blocks:
        if block.type == "image":
            assert block.source is not None
            found.append(block.source.picture(f"{where}[{index}].source"))
        else:
            found.append({"type": "text", "text": block.text or ""})
    return found


_SHOWN = ("text", "image")
"""Types of blocks allowed in a message or tool result."""


def _check_blocks(blocks: list[Block], known: Collection[str], where: str, place: str = "here") -> None:
    for index, block in enumerate(blocks):
        check_type(block.type, known, f"{where}[{index}]: {place} blocks")


def _user(message: AnthropicMessage, where: str) -> list[dict[str, Any]]:
    """Convert a message; tool results become messages of their own, before its text."""
    found: list[dict[str, Any]] = []
    known = ("text", "image", "tool_result") if message.role == "user" else ("text",)
    _check_blocks(message.blocks, known, where, f"in a message of the {message.role}")
    parts = [(index, block) for index, block in enumerate(message.blocks) if block.type in _SHOWN]
    for index, block in enumerate(message.blocks):
        if block.type == "tool_result":
            content: Any = block.content or ""
            if not isinstance(content, str):
                place = f"{where}[{index}].content"
                _check_blocks(content, _SHOWN, place)
                content = _parts(enumerate(content), place)
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if parts or not found:
        found.append({"role": message.role, "content": _parts(parts, where)})
    return found


def _assistant(message: AnthropicMessage, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": None}
    texts, thoughts, calls = [], [], []
    known = ("text", "thinking", "redacted_thinking", "tool_use")
    _check_blocks(message.blocks, known, where, "in a message of the assistant")
    for block in message.blocks:
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "thinking":
                thoughts.append(block.thinking or "")
            case "tool_use":
                calls.append(
                    {
                        "id": block.id,
                        "type": "function",
                        "function": {"name": block.name, "arguments": block.input or {}},
                    }
                )
    if texts or not calls:
        found["content"] = "".join(texts)
    if thoughts:
        found["reasoning"] = "".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


class MessageUsage(msgspec.Struct):
    """Usage in Anthropic's answer. input_tokens: tokens that were not cached."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class TextBlock(msgspec.Struct, tag="text"):
    """Text. `citations` are omitted, because clients accept a list or nothing."""

    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """Thoughts in Anthropic's answer. signature: empty, because returned thinking is not verified."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageResponse(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    input_tokens: int
