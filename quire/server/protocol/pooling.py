"""Bodies of requests for vectors, labels and scores: OpenAI's embeddings, and vLLM's and Jina's shapes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quire.errors import UserError
from quire.pooling_params import PoolingParams
from quire.server.protocol.common import MAX_STRING, Identifier, Int32, Priority, RequestStruct, ShortString, TokenId
from quire.server.protocol.messages import Messages, check_continuation

MAX_INPUTS = 2048
"""Maximum texts in one request; OpenAI's."""

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
NumberType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Padding = Literal["max_length", "do_not_pad"]
ByteOrder = Literal["native", "little", "big"]
POOLING_TASKS = ("embed", "classify")
MaxTokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
Mixed = str | list[TokenId | str]
"""Text, or token ids with texts between."""


class TextPart(msgspec.Struct, frozen=True):
    text: str
    type: Literal["text"] = "text"


class InputObject(RequestStruct, kw_only=True, frozen=True):
    """Text in llama.cpp's forms."""

    prompt_string: str | None = None
    content: Annotated[list[TextPart], Meta(min_length=1)] | None = None

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {"multimodal_data": ([],)}

    def __post_init__(self) -> None:
        if (self.prompt_string is None) == (self.content is None):
            raise UserError("give either prompt_string or content", param="content")

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ()) if self.prompt_string is None else self.prompt_string


Inputs = str | InputObject | Annotated[list[TokenId | str | InputObject | list[TokenId | str]], Meta(min_length=1)]


def texts_of(given: Any, field: str = "input") -> list[Mixed]:
    """All texts; a list with token ids is one. Raises UserError."""
    entries: list[Any] = given if isinstance(given, list) else [given]
    if not any(isinstance(entry, int) for entry in entries):
        return [entry if isinstance(entry, str | list) else entry.text for entry in entries]
    if not all(isinstance(entry, int | str) for entry in entries):
        raise UserError(f"{field} must hold token ids and texts, or {field}s", param=field)
    return [entries]


class PooledFields(RequestStruct, kw_only=True, frozen=True):
    """Fields of all pooling requests."""

    model: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_STRING)] | None = None
    priority: Priority = 0
    request_id: Identifier | None = None
    user: str | None = None


class PoolingFields(PooledFields, kw_only=True, frozen=True):
    """Fields shared by all routes here. truncate_prompt_tokens, dimensions, normalize, use_activation: see
    PoolingParams."""

    truncate_prompt_tokens: Int32 | None = None
    use_activation: bool | None = None

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "chat_template": (),
        "mm_processor_kwargs": ({},),
        "truncation_side": ("right",),
    }

    def params(self, **more: Any) -> PoolingParams:
        """Parameters for the engine. more: parameters that only one route has."""
        cut = self.truncate_prompt_tokens
        return PoolingParams(truncate_prompt_tokens=cut, use_activation=self.use_activation, **more)


class InputFields(PoolingFields, kw_only=True, frozen=True):
    """input: a text, token ids (between which texts may stand), or a list of these. messages: conversation instead,
    rendered with the model's template. add_special_tokens: default true for texts, false for a conversation. padding:
    see PoolingParams."""

    input: Inputs | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    padding: Padding | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.input is None) == (self.messages is None):
            raise UserError("give either input or messages", param="input")
        if self.messages is not None:
            check_continuation(self.add_generation_prompt, self.continue_final_message, self.messages)
        elif len(self.inputs) > MAX_INPUTS:
            raise UserError(f"at most {MAX_INPUTS} texts are allowed, not {len(self.inputs)}", param="input")

    @property
    def field_name(self) -> str:
        return "input" if self.messages is None else "messages"

    def params(self, **more: Any) -> PoolingParams:
        return super().params(padding=self.padding, **more)

    @property
    def special_tokens(self) -> bool:
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

    @property
    def generation_prompt(self) -> bool:
        return self.add_generation_prompt

    @property
    def inputs(self) -> list[Mixed]:
        return [] if self.input is None else texts_of(self.input)


class VectorFields(InputFields, kw_only=True, frozen=True):
    """encoding_format: numbers, base64 of their bytes, or raw bytes as the response's body; embed_dtype and endianness
    describe the bytes."""

    encoding_format: EncodingFormat = "float"
    embed_dtype: NumberType = "float32"
    endianness: ByteOrder = "native"
    dimensions: Int32 | None = None
    normalize: bool | None = None

    @property
    def wants_bytes(self) -> bool:
        return self.encoding_format.startswith("bytes")


class EmbeddingRequest(VectorFields, kw_only=True, frozen=True):
    """Texts to embed. use_activation: vLLM's name of `normalize`, which wins."""

    @property
    def normalizes(self) -> bool | None:
        return self.use_activation if self.normalize is None else self.normalize


class PoolingRequest(VectorFields, kw_only=True, frozen=True):
    """Texts to pool, into a vector or label scores each. task: required task of the model, one of POOLING_TASKS; None:
    any."""

    task: ShortString | None = None


class ClassificationRequest(InputFields, kw_only=True, frozen=True):
    """Texts to classify."""


class PairFields(PoolingFields, kw_only=True, frozen=True):
    """Pairs of texts to score. max_tokens_per_query, max_tokens_per_doc: cut longer texts; 0: no limit."""

    max_tokens_per_query: MaxTokens = 0
    max_tokens_per_doc: MaxTokens = 0

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        **PoolingFields.UNSUPPORTED,
        "chat_template_kwargs": ({},),
        "instruction": (),
        "padding": ("do_not_pad",),
    }

    @property
    def field_names(self) -> tuple[str, str]:
        """Names of the fields with the pairs' first and second texts."""
        return "query", "documents"


class ScoreRequest(PairFields, kw_only=True, frozen=True):
    """Body of /score. text_1: one text for all, or as many as text_2. The other fields are vLLM's newer names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    def __post_init__(self) -> None:
        for names in (FIRST_NAMES, SECOND_NAMES):
            if sum(getattr(self, name) is not None for name in names) != 1:
                raise UserError(f"give one of {', '.join(names)}", param=names[0])
        if len(self.firsts) not in (1, len(self.seconds)):
            raise UserError(
                f"got {len(self.firsts)} texts for {len(self.seconds)}: give one, or as many", param="text_1"
            )

    @property
    def field_names(self) -> tuple[str, str]:
        first, second = (
            next(name for name in names if getattr(self, name) is not None) for names in (FIRST_NAMES, SECOND_NAMES)
        )
        return first, second

    @property
    def firsts(self) -> list[str]:
        return self._given(0)

    @property
    def seconds(self) -> list[str]:
        return self._given(1)

    def _given(self, place: int) -> list[str]:
        texts: Texts = getattr(self, self.field_names[place])
        return [texts] if isinstance(texts, str) else texts


FIRST_NAMES = ("text_1", "queries", "data_1")
SECOND_NAMES = ("text_2", "documents", "items", "data_2")


class RerankRequest(PairFields, kw_only=True, frozen=True):
    """Body of /rerank. top_n: number of best results to return; 0: all. return_documents: include the texts."""

    query: str
    documents: Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    return_documents: bool = True


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class EmbeddingItem(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class PoolingItem(msgspec.Struct):
    index: int
    data: list[float] | str
    object: str = "pooling"


class ClassificationItem(msgspec.Struct):
    """Result for one text. label: most probable. probs: probability of each label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ScoreItem(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ListResponse(msgspec.Struct, kw_only=True):
    """Answer with a list of results. created: Unix time in seconds."""

    id: str
    created: int
    model: str
    object: str = "list"
    usage: PoolingUsage


class EmbeddingResponse(ListResponse, kw_only=True):
    data: list[EmbeddingItem]


class PoolingResponse(ListResponse, kw_only=True):
    data: list[PoolingItem]


class ClassificationResponse(ListResponse, kw_only=True):
    data: list[ClassificationItem]


class ScoreResponse(ListResponse, kw_only=True):
    data: list[ScoreItem]


class RerankDocument(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct, omit_defaults=True):
    """One document's score. index: position of the document in the request."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(msgspec.Struct):
    """Answer of /rerank. results: best first; equal scores in order of the documents."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]
