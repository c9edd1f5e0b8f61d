"""Bodies of llama.cpp's API, and their conversion to completions (docs/doors.md lists all fields)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.errors import UserError
from quire.server.protocol.common import Int32, LoraScale, RequestStruct, ShortString, TokenId
from quire.server.protocol.pooling import MAX_INPUTS, Inputs, Mixed, PooledFields, texts_of
from quire.server.protocol.structured import ConstraintText

SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's defaults, if neither request nor model has any."""
NAMES = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "structured_outputs": "json_schema",
    "response_format": "json_schema",
    "suffix": "input_suffix",
}
"""Engine's field names -> llama.cpp's, for errors."""
MAX_EXTRA = 1024
"""Maximum texts in `input_extra`."""
MAX_RESPONSE_FIELDS = 64
MAX_PROMPTS = 64
RANDOM_SEED = 2**32 - 1
BOTH = "give grammar or json_schema, not both"
NEVER = -100.0
"""Bias of false."""
CHANGES_ANSWER: dict[str, tuple[object, ...]] = {
    "adaptive_target": (-1.0, -1),
    "dry_multiplier": (0.0, 0),
    "dynatemp_range": (0.0, 0),
    "min_keep": (0,),
    "mirostat": (0, 0.0),
    "multimodal_data": ([],),
    "n_cmpl": (1,),
    "penalize_nl": (False,),
    "tfs_z": (1.0, 1),
    "top_n_sigma": (-1.0, -1, 0, 0.0),
    "typ_p": (1.0, 1),
    "typical_p": (1.0, 1),
    "xtc_probability": (0.0, 0),
}
"""Unsupported fields -> harmless values."""
NOTED = frozenset(
    {
        "cache_prompt",
        "id_slot",
        "n_cache_reuse",
        "n_discard",
        "n_indent",
        "n_keep",
        "return_progress",
        "samplers",
        "slot_id",
        "speculative.n_min",
        "speculative.p_min",
        "t_max_prompt_ms",
        "timings_per_token",
    }
)
"""Fields about slots, their cache and the order of samplers."""
IDLE = frozenset(
    {
        "adaptive_decay",
        "dry_allowed_length",
        "dry_base",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "mirostat_eta",
        "mirostat_tau",
        "xtc_threshold",
    }
)
"""Parameters of samplers that are off."""


class SamplerFields(RequestStruct, kw_only=True, frozen=True):
    """Sampling fields common to llama.cpp and Ollama. repeat_penalty: covers all tokens so far, or none if
    repeat_last_n is 0. seed: negative for a random one."""

    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Int32 | None = None

    def sampler_fields(self, usual: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a chat or completion. usual: API's defaults. defaults: the model's, which win."""
        names = ("temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
        found: dict[str, Any] = {name: value for name, value in usual.items() if name not in defaults}
        found |= {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.seed is not None and 0 <= self.seed != RANDOM_SEED:
            found["seed"] = self.seed
        if self.repeat_penalty is not None and self.repeat_last_n != 0:
            found["repetition_penalty"] = self.repeat_penalty
        return found


class LlamaFields(SamplerFields, kw_only=True, frozen=True):
    """Fields of completions and infilling. n_predict: 0: only compute the prompt; negative: fill the context.
    t_max_predict_ms: time after the first token, after which the answer ends at its next line break. response_fields:
    paths of the fields to return (`a/b`: b of a). num_drafts: most drafts per step."""

    model: str | None = None
    stream: bool = False
    n_predict: Int32 | None = None
    ignore_eos: bool | None = None
    grammar: ConstraintText = ""
    json_schema: dict[str, Any] | None = None
    logit_bias: dict[str, float | bool] | list[tuple[int | str, float | bool]] | None = None
    n_probs: Annotated[int, Meta(ge=0)] = 0
    post_sampling_probs: bool = False
    return_tokens: bool = False
    t_max_predict_ms: Annotated[int, Meta(ge=0)] | None = None
    response_fields: Annotated[list[ShortString], Meta(max_length=MAX_RESPONSE_FIELDS)] | None = None
    lora: Annotated[list[LoraScale], Meta(max_length=1024)] | None = None
    num_drafts: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = msgspec.field(name="speculative.n_max", default=None)

    NO_EFFECT: ClassVar[frozenset[str]] = IDLE
    NOTED: ClassVar[frozenset[str]] = NOTED
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = CHANGES_ANSWER

    def __post_init__(self) -> None:
        if self.grammar and self.json_schema is not None:
            raise UserError(BOTH, param="grammar")

    @property
    def names(self) -> dict[str, str]:
        """NAMES with the constraint's."""
        return NAMES | ({"structured_outputs": "grammar"} if self.grammar else {})

    @property
    def noted(self) -> list[str]:
        """Given fields without effect: the penalty covers all tokens, not just the last ones."""
        return ["repeat_last_n"] if (self.repeat_last_n or 0) > 0 else []

    @property
    def biases(self) -> list[tuple[int | str, float]]:
        """`logit_bias` as pairs; decimal keys are token ids."""
        given = self.logit_bias or {}
        pairs = (
            given
            if isinstance(given, list)
            else [(int(k.lstrip("0")[:11] or 0) if k.isdecimal() else k, v) for k, v in given.items()]
        )
        return [(key, NEVER if value is False else float(value)) for key, value in pairs]

    def to_completion(self, prompt: str | list[int], defaults: Mapping[str, Any], longest: int) -> dict[str, Any]:
        """Body of the completion. defaults: the model's sampling parameters. longest: context length in tokens."""
        found = self.sampler_fields(SAMPLING, defaults)
        if self.ignore_eos is not None:
            found["ignore_eos"] = self.ignore_eos
        if self.model is not None:
            found["model"] = self.model
        if self.num_drafts is not None:
            found["num_speculative_tokens"] = self.num_drafts
        if self.lora:
            found["lora"] = msgspec.to_builtins(self.lora)
        if self.grammar:
            found["structured_outputs"] = {"grammar": self.grammar}
        if self.json_schema is not None:
            found["response_format"] = {"type": "json_object", "schema": self.json_schema}
        if self.n_probs:
            found |= {"logprobs": self.n_probs, "return_tokens_as_token_ids": True}
        limit = -1 if self.n_predict is None else self.n_predict
        found["max_tokens"] = longest if limit < 0 else max(limit, 1)
        return found | {"prompt": prompt, "return_token_ids": True}


class LlamaPromptText(RequestStruct, kw_only=True, frozen=True):
    text: str = msgspec.field(name="prompt_string")

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {"multimodal_data": ([],)}


class LlamaCompletionRequest(LlamaFields, kw_only=True, frozen=True):
    """prompt: text, token ids, both, or a list of these."""

    prompt: str | LlamaPromptText | list[TokenId | str | LlamaPromptText | list[TokenId | str]]

    def __post_init__(self) -> None:
        super().__post_init__()
        prompts = self.prompts
        if not all(prompts) or not prompts:
            raise UserError("prompt must not be empty", param="prompt")
        if len(prompts) > MAX_PROMPTS:
            raise UserError(f"at most {MAX_PROMPTS} prompts are allowed in one request", param="prompt")

    @property
    def prompts(self) -> list[Mixed]:
        """All prompts; a list with a token id is one."""
        return texts_of(self.prompt, "prompt")


class LlamaExtra(msgspec.Struct, frozen=True):
    text: str
    filename: str = ""

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"time"})


class LlamaInfillRequest(LlamaFields, kw_only=True, frozen=True):
    """Infilling between two texts. prompt: beginning of the answer. input_extra: texts of other files."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[LlamaExtra], Meta(max_length=MAX_EXTRA)] = []  # noqa: RUF012  # msgspec copies it
    prompt: str = ""


class LlamaEmbeddingRequest(PooledFields, kw_only=True, frozen=True):
    """Body of POST /embedding. content or input: see InputFields. embd_normalize: -1 for raw vectors, 2 (default) for
    the model's normalization."""

    content: Inputs | None = None
    input: Inputs | None = None
    embd_normalize: int = 2

    def __post_init__(self) -> None:
        if (self.content is None) == (self.input is None):
            raise UserError("give either content or input", param="content")
        if len(self.texts) > MAX_INPUTS:
            raise UserError(f"at most {MAX_INPUTS} texts are allowed, not {len(self.texts)}", param=self.field_name)
        if self.embd_normalize not in (-1, 2):
            raise UserError(f"embd_normalize must be -1 or 2, not {self.embd_normalize}", param="embd_normalize")

    @property
    def field_name(self) -> str:
        return "input" if self.content is None else "content"

    @property
    def texts(self) -> list[Mixed]:
        given = self.input if self.content is None else self.content
        return [] if given is None else texts_of(given)


class LlamaTimings(msgspec.Struct):
    """Tokens, milliseconds and tokens per second. cache_n: prompt tokens from the cache. prompt: others, until the
    first token. predicted: generated tokens, from the first to the last."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaProbability(msgspec.Struct, kw_only=True):
    """prob, top_probs: with `post_sampling_probs`."""

    id: int
    token: str
    bytes: list[int]
    logprob: float | UnsetType = UNSET
    top_logprobs: list[LlamaProbability] | UnsetType = UNSET
    prob: float | UnsetType = UNSET
    top_probs: list[LlamaProbability] | UnsetType = UNSET


class LlamaResponse(msgspec.Struct, kw_only=True):
    """stop_type: eos, limit, word or none. tokens_cached, tokens_evaluated: prompt tokens.
    has_new_line: the text has one. truncated: the context is full."""

    index: int = 0
    content: str
    tokens: list[int]
    id_slot: int = -1
    stop: bool
    model: str | UnsetType = UNSET
    tokens_predicted: int
    tokens_evaluated: int
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    completion_probabilities: list[LlamaProbability] | UnsetType = UNSET
    timings: LlamaTimings | UnsetType = UNSET


class LlamaChosenFields(msgspec.Struct):
    """Answer cut to the fields that `response_fields` names."""


class LlamaEmbedding(msgspec.Struct):
    index: int
    embedding: list[list[float]]


class LlamaPrompt(msgspec.Struct):
    prompt: str


class LlamaGenerationSettings(msgspec.Struct):
    n_ctx: int
    params: dict[str, Any]


class LlamaProps(msgspec.Struct, kw_only=True):
    """Answer of GET /props. chat_template: empty unless the settings show it. model_path: always empty."""

    default_generation_settings: LlamaGenerationSettings
    total_slots: int
    model_alias: str
    model_path: str = ""
    chat_template: str
    modalities: dict[str, bool]
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


class LlamaSlot(msgspec.Struct):
    """Place in the batch, in the answer of GET /slots, without its contents."""

    id: int
    n_ctx: int
    is_processing: bool
    speculative: bool = False


class LlamaPiece(msgspec.Struct):
    """Token and its text, or the bytes of a partial character."""

    id: int
    piece: str | list[int]


class LlamaTokens(msgspec.Struct):
    tokens: Sequence[int | LlamaPiece]
