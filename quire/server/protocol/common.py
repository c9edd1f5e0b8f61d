"""What completions and chat completions have in common: sampling fields, stream options, usage."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from quire.errors import UserError
from quire.request import MAX_PRIORITY
from quire.sampling_params import SamplingParams

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
    """`UNSUPPORTED`: fields that are known and not supported -> the values that ask for nothing and so are accepted."""

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {}


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage: a last chunk with the usage. continuous_usage_stats: the usage so far in each chunk too."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(RequestStruct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Fields of every generating request. None means "not given": SamplingParams holds the defaults and the checks."""

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
    timeout_s: float | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_STRING)] | None = None
    request_id: Identifier | None = None
    priority: Priority = 0
    user: ShortString | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise UserError("stream_options is only allowed together with stream", param="stream_options")

    def sampling_params(self, **more: Any) -> SamplingParams:
        """Build the engine's settings from what was given; `more` holds what the endpoint words differently."""
        given = {name: value for name in _SAMPLING_NAMES if (value := getattr(self, name)) is not None}
        return SamplingParams(**(given | more))


_SAMPLING_NAMES = tuple(name for name in SamplingFields.__struct_fields__ if name in SamplingParams.__struct_fields__)

UNSUPPORTED_FIELDS: dict[str, tuple[object, ...]] = {
    "allowed_tools": (),
    "beam_width": (),
    "chat_template": (),
    "detokenize": (True,),
    "early_stopping": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0, 1),
    "logits_processors": ([],),
    "lora_request": (),
    "metadata": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Known fields of OpenAI and vLLM that are refused, with the values that ask for nothing and so are accepted."""


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of one request; a prompt counts once however many completions it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
