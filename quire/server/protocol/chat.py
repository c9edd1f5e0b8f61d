"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.errors import UserError
from quire.sampling_params import SamplingParams
from quire.server.protocol.common import UNSUPPORTED_FIELDS, AnswerTimes, Int32, PromptLogprobs, Usage
from quire.server.protocol.messages import Messages, check_continuation, with_tool_calls
from quire.server.protocol.tools import (
    MAX_TOOLS,
    FunctionCall,
    FunctionCallDelta,
    FunctionDefinition,
    NamedFunction,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolFields,
)

SUPPORTED_CHAT_FIELDS = (
    "chat_template",
    "early_stopping",
    "length_penalty",
    "use_beam_search",
)
UNSUPPORTED_CHAT_FIELDS: dict[str, tuple[object, ...]] = {
    **{name: values for name, values in UNSUPPORTED_FIELDS.items() if name not in SUPPORTED_CHAT_FIELDS},
    "best_of": (1,),
}


MAX_TEMPLATE = 2**20
TemplateSource = Annotated[str, Meta(max_length=MAX_TEMPLATE)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_CONVERSATIONS = 1024


class TemplateInputs(NamedTuple):
    """Inputs of a chat template. documents: for retrieval. source: template instead of the model's. options: further
    variables. mm_processor_kwargs, media_io_kwargs: image options, if the server allows them in requests. cache_salt:
    request's own."""

    documents: list[dict[str, Any]] | None = None
    source: str | None = None
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None


class PredictedText(msgspec.Struct, frozen=True):
    text: str
    type: Literal["text"] = "text"


class Prediction(msgspec.Struct, frozen=True):
    """Text that the client expects, whole or in parts: OpenAI's predicted output."""

    content: str | list[PredictedText]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatRequest(ToolFields, kw_only=True, frozen=True):
    """Body of a chat completion. max_completion_tokens: newer name of max_tokens; it wins. logprobs: return
    log-probabilities, with `top_logprobs` alternatives. echo: begin the answer with the last message if it has the same
    role. documents, reasoning_effort: for templates; the latter also sets `enable_thinking`, unless
    chat_template_kwargs does. chat_template: instead of the model's. use_beam_search: with n beams. functions,
    function_call: OpenAI's old tools and tool_choice, answered in the old form."""

    messages: Messages
    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    logprobs: bool = False
    top_logprobs: Int32 | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: TemplateSource | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    echo: bool = False
    return_prompt_text: bool = False
    functions: Annotated[list[FunctionDefinition], Meta(max_length=MAX_TOOLS)] = msgspec.field(default_factory=list)
    function_call: str | NamedFunction | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    prediction: Prediction | None = None

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = UNSUPPORTED_CHAT_FIELDS

    def __post_init__(self) -> None:
        self.check_stream_options()
        self.check_special_tokens()
        if self.top_logprobs and not self.logprobs:
            raise UserError("top_logprobs is only allowed together with logprobs", param="top_logprobs")
        self.check_listed(self.logprobs)
        if self.stream and self.use_beam_search:
            raise UserError("beam search cannot be streamed: its answer is known at its end", param="stream")
        self.check_tools()
        self.check_functions()
        check_continuation(self.add_generation_prompt, self.continue_final_message, self.messages)

    def check_functions(self) -> None:
        """Raises UserError if `function_call` does not fit the functions."""
        choice = self.function_call
        if self.functions and (self.tools or self.tool_choice):
            raise UserError("functions and function_call go without tools and tool_choice", param="functions")
        if isinstance(choice, str) and choice not in ("none", "auto"):
            raise UserError(
                f"function_call must be none, auto or a function, not {choice!r:.80}", param="function_call"
            )
        if isinstance(choice, NamedFunction) and choice.name not in [function.name for function in self.functions]:
            raise UserError(f"function_call names {choice.name!r}, which is not in functions", param="function_call")

    @property
    def with_tools(self) -> ChatRequest:
        """Request with `functions` as `tools`, at most one of which is called."""
        if not self.functions:
            return self
        choice = self.function_call
        return msgspec.structs.replace(
            self,
            functions=[],
            function_call=None,
            tools=[Tool(function) for function in self.functions],
            tool_choice=ToolChoice(function=choice) if isinstance(choice, NamedFunction) else choice,
            parallel_tool_calls=False,
        )

    @property
    def chat_messages(self) -> list[dict[str, Any]]:
        """Chat-completion messages of the request, for `messages_of`."""
        messages = with_tool_calls(self.messages) if self.functions else self.messages
        return [message.to_dict() for message in messages]

    @property
    def generation_prompt(self) -> bool:
        return self.add_generation_prompt is not False and not self.continue_final_message

    @property
    def template_inputs(self) -> TemplateInputs:
        """Template inputs that only some conversations have."""
        options: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
            if "enable_thinking" not in self.chat_template_kwargs:
                options["enable_thinking"] = self.reasoning_effort != "none"
        media = (self.mm_processor_kwargs, self.media_io_kwargs)
        return TemplateInputs(self.documents, self.chat_template, options, *media, self.cache_salt)

    def echoed(self, role: str) -> str:
        """Text that an answer in `role` begins with."""
        last = self.messages[-1]
        return last.text if self.echo and last.role == role else ""

    @property
    def special_tokens(self) -> bool:
        return self.add_special_tokens

    def to_sampling_params(self) -> SamplingParams:
        num_best = 0 if self.logprob_token_ids else self.top_logprobs or 0
        logprobs = num_best if self.logprobs else None
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        try:
            names = ("use_beam_search", "length_penalty", "early_stopping")
            given = {name: value for name in names if (value := getattr(self, name)) is not None}
            return self.sampling_params(max_tokens=limit, logprobs=logprobs, **given)
        except UserError as error:
            raise error.named(self.names) from None

    @property
    def names(self) -> dict[str, str]:
        """Engine field names -> the client's, where they differ."""
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.functions:
            names |= {"tools": "functions", "tool_choice": "function_call"}
        return names


class ChatBatchRequest(ChatRequest, kw_only=True, frozen=True):
    """Conversations with the same settings, one answer each, without tools."""

    messages: Annotated[list[Messages], Meta(min_length=1, max_length=MAX_CONVERSATIONS)]  # type: ignore[assignment]

    def __post_init__(self) -> None:
        refused = {
            "stream": self.stream,
            "use_beam_search": self.use_beam_search,
            "tools": self.tools,
            "functions": self.functions,
            "n": self.n not in (None, 1),
        }
        for name, is_given in refused.items():
            if is_given:
                raise UserError(f"{name} is not supported with several conversations", param=name)
        self.conversations  # noqa: B018  # each is checked when it is made

    @property
    def conversations(self) -> list[ChatRequest]:
        fields = {name: getattr(self, name) for name in ChatRequest.__struct_fields__}
        return [ChatRequest(**{**fields, "messages": each, "request_id": None}) for each in self.messages]


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
    refusal: None = None


class AssistantMessage(msgspec.Struct):
    """reasoning, reasoning_content: two names of the model's reasoning, vLLM's current and DeepSeek's. function_call:
    only if the request has `functions`. tool_calls: omitted if empty, as by OpenAI."""

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: FunctionCall | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] = []
    function_call: FunctionCallDelta | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


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
    metrics: AnswerTimes | UnsetType | None = UNSET
    service_tier: None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_text: str | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: AnswerTimes | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
