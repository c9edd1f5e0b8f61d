"""/v1/responses: OpenAI's Responses API, and the chat completion that a request means."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quire.errors import UserError
from quire.server.protocol.common import Identifier, Int32, Priority, ShortString
from quire.server.protocol.messages import MAX_MESSAGES

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""The chat endpoint's names of fields -> the ones here, for errors."""

PASSED_ON = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "ignore_eos",
    "cache_salt",
    "chat_template_kwargs",
    "request_id",
    "priority",
    "user",
)
"""Fields that the chat endpoint has under the same name."""

LOGPROBS = "message.output_text.logprobs"
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Type of a part of a message -> its field."""
_MEDIA = ("image_url", "file_id", "file_data", "file_url", "filename", "input_audio")
_ITEM_NO_EFFECT = frozenset(
    {
        "id",
        "status",
        "phase",
        "encrypted_content",
        "caller",
        "namespace",
        "async",
        "created_by",
        "internal_chat_message",
    }
)


class Part(msgspec.Struct, frozen=True):
    """A part of a message, of a tool's output or of thoughts."""

    type: str
    text: str | None = None
    refusal: str | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "detail"})
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = dict.fromkeys(_MEDIA, ())


class InputItem(msgspec.Struct, frozen=True):
    """message, function_call, function_call_output or reasoning; without a type a message."""

    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: ShortString | None = None
    name: ShortString | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = _ITEM_NO_EFFECT

    def __post_init__(self) -> None:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }
        if self.type not in needed:
            raise UserError(
                f"items of type {self.type!r} are not supported (only {', '.join(map(repr, needed))} are)", param="type"
            )
        for name in needed[self.type]:
            if getattr(self, name) is None:
                raise UserError(f"an item of type {self.type!r} needs {name}", param=name)


class FunctionTool(msgspec.Struct, frozen=True):
    """A tool of the client. The server's own tools of OpenAI's API have other types."""

    type: str
    name: ShortString | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"allowed_callers", "defer_loading", "output_schema"})

    def __post_init__(self) -> None:
        if self.type != "function":
            raise UserError(f"tools of type {self.type!r} are not supported (only 'function' is)", param="type")
        if self.name is None:
            raise UserError("a tool of type 'function' needs a name", param="name")

    def to_chat(self) -> dict[str, Any]:
        fields = ("name", "description", "parameters", "strict")
        function = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        return {"type": "function", "function": function}


class NamedTool(msgspec.Struct, frozen=True):
    """tool_choice: a function, or `allowed_tools` with a mode and a list of them."""

    type: str
    name: ShortString | None = None
    mode: ShortString | None = None
    tools: list[dict[str, Any]] | None = None

    def to_chat(self) -> dict[str, Any]:
        if self.type == "function" and self.name is not None:
            return {"type": "function", "function": {"name": self.name}}
        if self.type == "allowed_tools" and self.tools:
            tools = [{"type": "function", "function": {"name": tool.get("name")}} for tool in self.tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode or "auto", "tools": tools}}
        raise UserError(
            f"tool_choice of type {self.type!r} is not supported (only 'function' with a name and 'allowed_tools' are)",
            param="tool_choice",
        )


class TextFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: ShortString | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True):
    format: TextFormat | None = None

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {"verbosity": ("medium",)}


class Reasoning(msgspec.Struct, frozen=True):
    """summary: without effect, since the thoughts themselves are in the answer."""

    effort: ShortString | None = None
    summary: ShortString | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"generate_summary", "context"})


class ResponsesRequest(msgspec.Struct, kw_only=True, frozen=True):
    """input: a text of the user, or items. instructions: the system's message. store: whether the response can be gone
    on from. Sampling fields as the chat endpoint has them."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: ShortString | None = None
    store: bool = True
    stream: bool = False
    tools: list[FunctionTool] = []
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    include: Annotated[list[ShortString], Meta(max_length=64)] = []
    top_logprobs: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: dict[str, str] = {}
    truncation: Literal["disabled"] = "disabled"
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: ShortString | list[ShortString] | None = None
    ignore_eos: bool | None = None
    cache_salt: ShortString | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    request_id: Identifier | None = None
    priority: Priority = 0
    user: ShortString | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {
            "access_programs",
            "moderation",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "stream_options",
        }
    )
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "prompt": (),
    }

    def to_chat(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        """The body of the chat completion, after the messages of `history`. Raises UserError."""
        fields = {name: value for name in PASSED_ON if (value := getattr(self, name)) is not None}
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        fields["messages"] = [*system, *history, *self.messages()]
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            fields["tools"] = [tool.to_chat() for tool in self.tools]
            choice = self.tool_choice
            fields["tool_choice"] = choice if isinstance(choice, str) else choice.to_chat()
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        elif self.tool_choice not in ("auto", "none"):
            raise UserError("tool_choice asks for a call, and there are no tools", param="tool_choice")
        if (form := self.text.format) is not None and form.type != "text":
            fields["response_format"] = {"type": form.type}
            if form.type == "json_schema":
                if form.schema is None:
                    raise UserError("text.format of type 'json_schema' needs a schema", param="text.format.schema")
                schema = {"name": form.name or "answer", "schema": form.schema, "strict": form.strict is not False}
                fields["response_format"]["json_schema"] = schema
        if self.reasoning is not None and self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if LOGPROBS in self.include:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return fields

    def messages(self) -> list[dict[str, Any]]:
        """What `input` adds to the conversation. Thoughts, text and calls that follow one another are one message of
        the assistant. Raises UserError."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found: list[dict[str, Any]] = []
        for index, item in enumerate(self.input):
            where = f"input[{index}]"
            if item.type == "function_call_output":
                content = _parts(item.output, f"{where}.output")
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            elif item.type == "message" and item.role != "assistant":
                found.append({"role": item.role, "content": _parts(item.content, f"{where}.content")})
            else:
                _add_to_assistant(found, item, where)
        return found


def _add_to_assistant(found: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Add thoughts, text or a call to the last message, or begin a new one where that has such a part already."""
    last = found[-1] if found and found[-1]["role"] == "assistant" else None
    if item.type == "function_call":
        if last is None:
            found.append(last := {"role": "assistant", "content": None})
        function = {"name": item.name, "arguments": item.arguments}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        return
    field = "reasoning" if item.type == "reasoning" else "content"
    if last is None or last.get("tool_calls") or last.get("content") is not None:
        found.append(last := {"role": "assistant", "content": None})
    parts = (item.content or item.summary or []) if field == "reasoning" else (item.content or "")
    text = parts if isinstance(parts, str) else "".join(_text(part, where) for part in parts)
    last[field] = last[field] + text if last.get(field) else text


def _parts(content: str | list[Part] | None, where: str) -> str | list[dict[str, str]]:
    if content is None or isinstance(content, str):
        return content or ""
    return [{"type": "text", "text": _text(part, f"{where}[{index}]")} for index, part in enumerate(content)]


def _text(part: Part, where: str) -> str:
    field = {**TEXT_PARTS, "reasoning_text": "text", "summary_text": "text"}.get(part.type)
    if field is None:
        known = ", ".join(map(repr, TEXT_PARTS))
        raise UserError(
            f"{where}: parts of type {part.type!r} are not supported (only {known} are)", param=f"{where}.type"
        )
    text = getattr(part, field)
    if text is None:
        raise UserError(f"{where}: a part of type {part.type!r} needs a {field}", param=f"{where}.{field}")
    assert isinstance(text, str)
    return text


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    text: str


class OutputText(msgspec.Struct, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputReasoning(msgspec.Struct, tag="reasoning"):
    id: str
    content: list[ReasoningText]
    status: str
    summary: list[Any] = []


class OutputMessage(msgspec.Struct, tag="message"):
    id: str
    content: list[OutputText]
    status: str
    role: str = "assistant"


class OutputCall(msgspec.Struct, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str


OutputItem = OutputReasoning | OutputMessage | OutputCall


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ResponseBody(msgspec.Struct, kw_only=True):
    """A response, as it is or as it was stored. status: in_progress, completed, incomplete or failed."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: Reasoning
    service_tier: str = "default"
    store: bool
    temperature: float | None = None
    text: TextConfig
    tool_choice: str | NamedTool
    tools: list[FunctionTool]
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None = None


class ResponseDeleted(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: str = "response.input_tokens"
