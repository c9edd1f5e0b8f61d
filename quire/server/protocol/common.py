"""What completions and chat completions have in common: sampling fields, stream options, usage."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.errors import UserError
from quire.request import MAX_PRIORITY
from quire.sampling_params import RepetitionDetectionParams, SamplingParams
from quire.server.protocol.foreign import CHANGES_ANSWER, NO_EFFECT
from quire.server.protocol.structured import StructuredFields

MAX_STRING = 1024
MAX_SEQUENCES = 4096
"""Most sequences (prompts times n) of one request."""

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
"""Lower is earlier."""
ShortString = Annotated[str, Meta(max_length=MAX_STRING)]
Identifier = Annotated[str, Meta(pattern=r"^[!-~]{1,128}$(?!\n)")]
"""Printable ASCII without spaces: safe in a header, a log line and a response id. (`$` alone lets a line feed follow in
Python; `\\Z` would say the same, but JSON Schema's regular expressions do not have it.)"""


class RequestStruct(msgspec.Struct, frozen=True):
    """`UNSUPPORTED`: fields that are known and not supported -> the values that ask for nothing and so are accepted.
    `NO_EFFECT`: fields that are known and mean nothing here."""

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {}
    NO_EFFECT: ClassVar[frozenset[str]] = NO_EFFECT


class StreamOptions(msgspec.Struct, frozen=True):
    """include_usage: a last chunk with the usage. continuous_usage_stats: the usage so far in each chunk too."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(StructuredFields, RequestStruct, kw_only=True, frozen=True):
    """Fields of every generating request. None means "not given": SamplingParams holds the defaults and the checks.

    stream_interval: tokens of each chunk after the first. return_tokens_as_token_ids: log-probabilities name tokens as
    token_id:N. spaces_between_special_tokens: where there are none, there is nothing to leave out.
    """

    model: str | None = None
    n: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: ShortString | list[ShortString] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=4096)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Int32 | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=2**20)] | None = None
    bad_words: Annotated[list[ShortString], Meta(max_length=1024)] | None = None
    logit_bias: dict[TokenId, float] | None = None
    prompt_logprobs: Int32 | None = None
    truncate_prompt_tokens: Int32 | None = None
    truncation_side: Literal["left", "right"] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    timeout_s: float | None = None
    thinking_token_budget: Int32 | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 1
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    spaces_between_special_tokens: bool = True
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_STRING)] | None = None
    request_id: Identifier | None = None
    priority: Priority = 0
    user: ShortString | None = None
    include_metrics: bool = False

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check_stream_options(self) -> None:
        if not self.stream and self.stream_options not in (None, StreamOptions()):
            raise UserError("stream_options is only allowed together with stream", param="stream_options")

    @property
    def max_kept_tokens(self) -> int | None:
        """Tokens that are left of a prompt; None for all that fit."""
        return None if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens

    def check_special_tokens(self) -> None:
        if not self.spaces_between_special_tokens and self.skip_special_tokens is False:
            raise UserError(
                "spaces_between_special_tokens=false is not supported by this server together with "
                "skip_special_tokens=false",
                param="spaces_between_special_tokens",
            )

    def sampling_params(self, **more: Any) -> SamplingParams:
        """Build the engine's settings from what was given; `more` holds what the endpoint words differently."""
        given = {name: value for name in _SAMPLING_NAMES if (value := getattr(self, name)) is not None}
        given["structured_outputs"] = self.to_structured_outputs()
        return SamplingParams(**(given | more))


_SAMPLING_NAMES = tuple(name for name in SamplingFields.__struct_fields__ if name in SamplingParams.__struct_fields__)

BEAM_SEARCH_FIELDS = ("use_beam_search", "beam_width", "length_penalty", "early_stopping")
UNSUPPORTED_FIELDS: dict[str, tuple[object, ...]] = {
    **CHANGES_ANSWER,
    "allowed_tools": (),
    "beam_width": (),
    "chat_template": (),
    "detokenize": (True,),
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "kv_transfer_params": ({},),
    "length_penalty": (1.0, 1),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "lora_request": (),
    "prompt_embeds": ([],),
    "routed_experts_prompt_start": (0,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
"""Known fields of OpenAI and vLLM that are refused, with the values that ask for nothing and so are accepted."""


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class AnswerTimes(msgspec.Struct):
    """What the phases of a request took, in milliseconds, and its speed; each None where there was no such phase.

    time_to_first_token_ms: from the first step. generation_time_ms: from the first token to the last. mean_itl_ms:
    between two tokens. tokens_per_second: from the first step to the last token.
    """

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Tokens of one request; a prompt counts once however many completions it gets. completion_tokens_details: of
    models that reason."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
