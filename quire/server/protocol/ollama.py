"""Bodies of Ollama's API, and their conversion to chats and completions (docs/doors.md lists all fields)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.errors import UserError
from quire.multimodal.sources import Picture, read_base64
from quire.pooling_params import PoolingParams
from quire.server.protocol.chat import ChatLogprob
from quire.server.protocol.common import Int32, RequestStruct, ShortString
from quire.server.protocol.foreign import MESSAGE_NO_EFFECT
from quire.server.protocol.llama_cpp import SamplerFields
from quire.server.protocol.messages import MAX_MESSAGES, check_role
from quire.server.protocol.pooling import MAX_INPUTS, PooledFields
from quire.server.protocol.structured import ConstraintText
from quire.server.protocol.tools import Tools

VERSION = "0.13.5"
"""Ollama version that the API follows. Copilot requires 0.6.4."""
SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's defaults, if neither request nor model has any."""
LOADING = frozenset(
    {
        "embedding_only",
        "f16_kv",
        "logits_all",
        "low_vram",
        "main_gpu",
        "num_batch",
        "num_ctx",
        "num_gpu",
        "num_keep",
        "num_thread",
        "numa",
        "use_mlock",
        "use_mmap",
        "vocab_only",
    }
)
"""Options for loading a model, which the server's own options decide."""
CHANGES_ANSWER: dict[str, tuple[object, ...]] = {"mirostat": (0, 0.0), "tfs_z": (1.0, 1), "typical_p": (1.0, 1)}
UNWANTED: dict[str, tuple[object, ...]] = {"width": (0,), "height": (0,), "steps": (0,)}
"""Fields of image generation."""
NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{
        name: f"options.{name}"
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "stop",
            "presence_penalty",
            "frequency_penalty",
        )
    },
    "response_format": "format",
    "reasoning_effort": "think",
    "structured_outputs": "format",
}
"""Engine's field names -> Ollama's, for errors."""

Think = bool | Literal["low", "medium", "high", "max"]


class OllamaOptions(SamplerFields, kw_only=True, frozen=True):
    """Sampling options. num_predict: maximum tokens; not positive: as many as the context holds."""

    num_predict: Int32 | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"mirostat_eta", "mirostat_tau"})
    NOTED: ClassVar[frozenset[str]] = LOADING | {"penalize_newline"}
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = CHANGES_ANSWER

    @property
    def noted(self) -> list[str]:
        """Options without effect: the penalty covers all tokens, not just the last ones."""
        return ["options.repeat_last_n"] if (self.repeat_last_n or 0) > 0 else []

    def sampling(self, defaults: Mapping[str, Any], longest: int) -> dict[str, Any]:
        """Fields of a chat or completion, with Ollama's defaults where the model has none. defaults: the model's
        sampling parameters. longest: context length in tokens."""
        limit = self.num_predict if (self.num_predict or 0) > 0 else longest
        return self.sampler_fields(SAMPLING, defaults) | {"max_tokens": limit}


NO_OPTIONS = OllamaOptions()


class OllamaFields(RequestStruct, kw_only=True, frozen=True):
    """Fields of chats and completions. format: "json" or a JSON schema. think: turn thinking on or off, or its effort.
    stream: on by default."""

    model: str
    stream: bool = True
    format: ConstraintText | dict[str, Any] | None = None
    options: OllamaOptions = NO_OPTIONS
    think: Think | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset()
    NOTED: ClassVar[frozenset[str]] = frozenset({"keep_alive", "shift", "truncate"})
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = UNWANTED | {"debug_render_only": (False,)}

    def __post_init__(self) -> None:
        if isinstance(self.format, str) and self.format not in ("", "json"):
            raise UserError(f'format must be "json" or a JSON schema, not {self.format!r:.100}', param="format")
        if self.top_logprobs and not self.logprobs:
            raise UserError("top_logprobs is only allowed together with logprobs", param="top_logprobs")

    def to_fields(self, model: str, defaults: Mapping[str, Any], longest: int) -> dict[str, Any]:
        """Fields common to chats and completions. model: the served name. defaults, longest: see `to_chat`."""
        found = {"model": model, **self.options.sampling(defaults, longest)}
        if self.format == "json":
            found["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            schema = {"name": "answer", "schema": self.format}
            found["response_format"] = {"type": "json_schema", "json_schema": schema}
        return found

    def to_chat(self, model: str, defaults: Mapping[str, Any], longest: int) -> dict[str, Any]:
        """Body of the chat completion, without messages. defaults: model's sampling parameters. longest: context
        length in tokens, the limit of an answer without `num_predict`."""
        found = self.to_fields(model, defaults, longest)
        if self.logprobs:
            found |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if isinstance(self.think, str):
            found["reasoning_effort"] = self.think
        if self.think is not None:
            found["chat_template_kwargs"] = {"enable_thinking": bool(self.think), "thinking": bool(self.think)}
        return found


class OllamaFunction(msgspec.Struct, frozen=True):
    """Function call. arguments: an object, or its JSON."""

    name: ShortString
    arguments: dict[str, Any] | str | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = MESSAGE_NO_EFFECT | {"description"}


class OllamaCall(msgspec.Struct, frozen=True):
    function: OllamaFunction
    id: ShortString | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = MESSAGE_NO_EFFECT


class OllamaMessage(msgspec.Struct, frozen=True):
    """Message. images: base64 of their files. tool_name, tool_call_id: call that a tool's result belongs to."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: ShortString | None = None
    tool_call_id: ShortString | None = None

    NO_EFFECT: ClassVar[frozenset[str]] = MESSAGE_NO_EFFECT

    def __post_init__(self) -> None:
        check_role(self.role)


class OllamaChatRequest(OllamaFields, kw_only=True, frozen=True):
    """Conversation. messages: if empty, the request only loads the model."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] = []  # noqa: RUF012  # msgspec copies it
    tools: Tools = []  # noqa: RUF012

    def to_chat(self, model: str, defaults: Mapping[str, Any], longest: int) -> dict[str, Any]:
        found = super().to_chat(model, defaults, longest)
        if self.tools:
            found["tools"] = [tool.to_dict() for tool in self.tools]
        last = self.messages[-1]
        if last.role == "assistant" and not last.tool_calls:  # the answer's beginning
            found |= {"add_generation_prompt": False, "continue_final_message": True}
        return found

    @property
    def chat_messages(self) -> list[dict[str, Any]]:
        """Chat-completion messages of the request. Calls get ids of the length that Mistral's templates require.
        Results without an id belong to the calls before them, by name or in order."""
        found: list[dict[str, Any]] = []
        waiting: dict[str, str] = {}
        number = 0
        for index, message in enumerate(self.messages):
            content = image_parts(message.images or [], message.content or "", f"messages[{index}].images")
            each: dict[str, Any] = {"role": message.role, "content": content}
            if message.role == "tool":
                each |= _result(message, waiting)
            if message.role == "assistant" and message.thinking:
                each["reasoning"] = message.thinking
            if message.role == "assistant" and message.tool_calls:
                each["tool_calls"], waiting = [], {}
                for call in message.tool_calls:
                    number += 1
                    call_id = call.id or f"call{number:05}"
                    waiting[call_id] = call.function.name
                    function = {"name": call.function.name, "arguments": call.function.arguments}
                    each["tool_calls"].append({"id": call_id, "type": "function", "function": function})
            found.append(each)
        return found


def image_parts(images: list[str], text: str, where: str) -> str | list[dict[str, Any] | Picture]:
    """Content of a message from base64 images and a text. where: path of the images, for errors. Raises UserError."""
    if not images:
        return text
    paths = [f"{where}[{index}]" for index in range(len(images))]
    pictures = [Picture(path, read_base64(image, path)) for image, path in zip(images, paths, strict=True)]
    return [*pictures, {"type": "text", "text": text}]


def _result(message: OllamaMessage, waiting: dict[str, str]) -> dict[str, Any]:
    named = [call_id for call_id, name in waiting.items() if name == message.tool_name]
    call_id = message.tool_call_id or next(iter(named or waiting), None)
    name = message.tool_name or waiting.get(call_id or "")
    waiting.pop(call_id or "", None)
    return {key: value for key, value in (("name", name), ("tool_call_id", call_id)) if value is not None}


class OllamaGenerateRequest(OllamaFields, kw_only=True, frozen=True):
    """Prompt, rendered by the chat template unless `raw`. suffix: text after the answer, for infilling. prompt: if
    empty, the request only loads the model."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    images: list[str] = []  # noqa: RUF012  # msgspec copies it

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        **OllamaFields.UNSUPPORTED,
        "template": ("",),
        "context": ([],),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        is_raw = self.raw or bool(self.suffix)
        for name in ("system", "images"):
            if is_raw and getattr(self, name):
                what = "raw" if self.raw else "suffix"
                raise UserError(f"{name} is only allowed without {what}: no chat template is used", param=name)
        if self.raw and self.suffix:
            raise UserError("suffix is only allowed without raw", param="suffix")

    @property
    def chat_messages(self) -> list[dict[str, Any]]:
        """Prompt as chat-completion messages, after `system`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = image_parts(self.images, self.prompt, "images")
        return [*system, {"role": "user", "content": content}]

    @property
    def size(self) -> int:
        return len(self.prompt) + sum(map(len, self.images))

    def to_completion(self, model: str, defaults: Mapping[str, Any], longest: int) -> dict[str, Any]:
        """Body of the completion for a prompt without a template."""
        found = self.to_fields(model, defaults, longest) | {"prompt": self.prompt}
        if self.logprobs:
            found["logprobs"] = self.top_logprobs or 0
        if self.suffix:
            found["suffix"] = self.suffix
        return found


class OllamaPooledFields(PooledFields, kw_only=True, frozen=True):
    options: OllamaOptions = NO_OPTIONS

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset()
    NOTED: ClassVar[frozenset[str]] = frozenset({"keep_alive"})

    def __post_init__(self) -> None:
        if not self.model:
            raise UserError("model is required", param="model")


class OllamaEmbedRequest(OllamaPooledFields, kw_only=True, frozen=True):
    """Body of POST /api/embed. truncate: cut the end of texts longer than the model's context, or refuse them."""

    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)]
    truncate: bool = True
    dimensions: Int32 | None = None

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input

    def params(self) -> PoolingParams:
        cut = -1 if self.truncate else None
        return PoolingParams(truncate_prompt_tokens=cut, dimensions=self.dimensions or None)


class OllamaEmbeddingsRequest(OllamaPooledFields, kw_only=True, frozen=True):
    """Old route of embeddings, for one text."""

    prompt: str = ""


class OllamaModelRequest(RequestStruct, kw_only=True, frozen=True):
    """Request about a model. name: old name of `model`."""

    model: str | None = None
    name: str | None = None
    stream: bool = True
    verbose: bool = False

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"insecure", "username", "password"})
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {"system": ("",), "template": ("",), "options": ({},)}

    def __post_init__(self) -> None:
        if not self.wanted:
            raise UserError("model is required", param="model")

    @property
    def wanted(self) -> str:
        return self.model or self.name or ""


class OllamaCalledFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any]
    index: int


class OllamaToolCall(msgspec.Struct):
    id: str
    function: OllamaCalledFunction


class OllamaAnswerMessage(msgspec.Struct):
    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaResponse(msgspec.Struct, kw_only=True):
    """Line of a stream, or whole answer. message: for chats. response, thinking: for prompts. Durations in nanoseconds:
    total, model load (0), prompt, and tokens after the first."""

    model: str
    created_at: str
    message: OllamaAnswerMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaEmbedResponse(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbeddingsResponse(msgspec.Struct):
    embedding: list[float]


class OllamaDetails(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    """Model in GET /api/tags. size: bytes of the weight files. digest: fingerprint of their names, sizes and times."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(msgspec.Struct):
    models: list[OllamaModel]


class OllamaRunningModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(msgspec.Struct):
    models: list[OllamaRunningModel]


class OllamaModelInfo(msgspec.Struct, kw_only=True):
    """template: parts of a prompt in Ollama's notation, without the chat template's text. parameters: sampling
    defaults, one per line."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaStatus(msgspec.Struct):
    status: str


class OllamaVersion(msgspec.Struct):
    version: str


class OllamaError(msgspec.Struct):
    error: str
