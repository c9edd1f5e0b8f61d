"""Bodies of OpenAI's /v1/responses, and their conversion to chat completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.errors import UserError
from quire.server.protocol.common import SharedFields, ShortString, TokenId
from quire.server.protocol.response_items import Items
from quire.server.protocol.response_tools import NamedTool, ResponseTool

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "truncate_prompt_tokens": "truncation",
}
"""Chat endpoint's field names -> the ones here, for errors."""

PASSED_ON = (
    *SharedFields.__struct_fields__,
    "chat_template_kwargs",
    "include_reasoning",
    "include_stop_str_in_output",
    "logit_bias",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "structured_outputs",
)
"""Fields with the same name at the chat endpoint."""

LOGPROBS = "message.output_text.logprobs"


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
    """Field `reasoning` of a request. summary: also return the reasoning as a summary, always in full."""

    effort: ShortString | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"generate_summary", "context"})


class ResponsesRequest(SharedFields, kw_only=True, frozen=True):
    """Body of a response request. input: a user's text, or items. instructions: system message. store: keep the
    response for later requests; None keeps all but those of a batch's lines. background: return at once.
    max_tool_calls: only echoed. truncation: "auto" cuts the beginning of a too long prompt. enable_response_messages:
    return texts and tokens of prompt and answer. Sampling fields as of chats."""

    input: str | Items
    instructions: str | None = None
    previous_response_id: ShortString | None = None
    store: bool | None = None
    background: bool = False
    stream: bool = False
    tools: list[ResponseTool] = []  # noqa: RUF012  # msgspec copies it
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    include: Annotated[list[ShortString], Meta(max_length=64)] = []  # noqa: RUF012
    top_logprobs: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    metadata: dict[str, str] = {}  # noqa: RUF012
    truncation: Literal["auto", "disabled"] = "disabled"
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[TokenId, float] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=4096)] | None = None
    structured_outputs: dict[str, Any] | None = None
    enable_response_messages: bool = False

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {
            "access_programs",
            "media_io_kwargs",
            "mm_processor_kwargs",
            "moderation",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "return_mm_kwargs",
            "safety_identifier",
            "service_tier",
            "session_id",
            "stream_options",
        }
    )
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "context_management": ([],),
        "conversation": (),
        "ec_transfer_params": ({},),
        "kv_transfer_params": ({},),
        "mm_payload": ({},),
        "previous_input_messages": ([],),
        "prompt": (),
        "watermarking": (False,),
    }

    def __post_init__(self) -> None:
        if self.background and self.store is False:
            raise UserError("background can only be used when `store` is true", param="background")

    def to_chat(self) -> dict[str, Any]:
        """Body of the chat completion, without messages. Raises UserError."""
        fields = {name: value for name in PASSED_ON if (value := getattr(self, name)) is not None}
        if self.truncation == "auto":
            fields["truncate_prompt_tokens"] = -1
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            fields["tools"] = [function for tool in self.tools for function in tool.to_chat()]
            choice = self.tool_choice
            fields["tool_choice"] = choice if isinstance(choice, str) else choice.to_chat(self.tools)
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
        if self.enable_response_messages:
            fields["return_token_ids"] = True
        if LOGPROBS in self.include:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return fields


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    text: str


class OutputText(msgspec.Struct, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class SummaryText(msgspec.Struct, tag="summary_text"):
    text: str


class OutputReasoning(msgspec.Struct, tag="reasoning"):
    id: str
    content: list[ReasoningText]
    status: str
    summary: list[SummaryText] = []


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
    namespace: str | UnsetType = UNSET


OutputItem = OutputReasoning | OutputMessage | OutputCall


class RawMessage(msgspec.Struct, tag="raw_message_tokens"):
    """Raw text and tokens of the prompt or the answer."""

    message: str
    tokens: list[int]


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
    """Response. status: queued, in_progress, completed, incomplete, failed or cancelled. temperature, top_p,
    presence_penalty, frequency_penalty: effective values."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    frequency_penalty: float
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None = None
    reasoning: Reasoning
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | NamedTool
    tools: list[ResponseTool]
    top_logprobs: int | None = None
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None = None
    input_messages: list[RawMessage] | UnsetType = UNSET
    output_messages: list[RawMessage] | UnsetType = UNSET


class ResponseDeleted(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: str = "response.input_tokens"


class ItemList(msgspec.Struct):
    """Page of a response's input items. first_id, last_id: null if it is empty."""

    data: list[dict[str, Any]]
    has_more: bool
    object: str = "list"
    first_id: str | None = None
    last_id: str | None = None
