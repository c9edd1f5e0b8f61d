"""Sampling fields and stream options common to completions and chats."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.errors import UserError
from quire.sampling_params import UNAVAILABLE, RepetitionDetectionParams, SamplingParams
from quire.server.protocol.common import Int32, LoraScale, ShortString, TokenId
from quire.server.protocol.structured import StructuredFields


class StreamOptions(msgspec.Struct, frozen=True):
    """include_usage: send a last chunk with the usage. continuous_usage_stats: usage so far in each chunk. Null means
    no; UNSET means not given, because clients send an empty object without a stream."""

    include_usage: bool | UnsetType | None = UNSET
    continuous_usage_stats: bool | UnsetType | None = UNSET


class SamplingFields(StructuredFields, kw_only=True, frozen=True):
    """logprob_token_ids: tokens whose log-probabilities are returned instead of the
    best ones. stream_interval: tokens of each chunk after the first. return_tokens_as_token_ids: name tokens token_id:N
    in log-probabilities. Both default to the server's settings. spaces_between_special_tokens: false only while special
    tokens are skipped. vllm_xargs: arguments of logits processors. lora: scales of llama.cpp's adapters."""

    n: Int32 | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=4096)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Int32 | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=2**20)] | None = None
    bad_words: Annotated[list[ShortString], Meta(max_length=1024)] | None = None
    logit_bias: dict[TokenId, float] | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=4096)] | None = None
    prompt_logprobs: Int32 | None = None
    truncate_prompt_tokens: Int32 | None = None
    truncation_side: Literal["left", "right"] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    timeout_s: float | None = None
    thinking_token_budget: Int32 | None = None
    num_speculative_tokens: Int32 | None = None
    vllm_xargs: dict[str, Any] | None = None
    lora: Annotated[list[LoraScale], Meta(max_length=1024)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None
    spaces_between_special_tokens: bool = True
    include_metrics: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return self.include_usage and options is not None and options.continuous_usage_stats is True

    def check_stream_options(self) -> None:
        if not self.stream and self.stream_options not in (None, StreamOptions()):
            raise UserError("stream_options is only allowed together with stream", param="stream_options")

    def check_listed(self, asks: bool) -> None:
        """Raise UserError for `logprob_token_ids` without log-probabilities. asks: the request asks for
        log-probabilities."""
        if self.logprob_token_ids is not None and not asks:
            raise UserError("logprob_token_ids is only allowed together with logprobs", param="logprob_token_ids")

    @property
    def max_kept_tokens(self) -> int | None:
        """Maximum tokens kept from a prompt; None for all that fit."""
        return None if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens

    def check_special_tokens(self) -> None:
        if not self.spaces_between_special_tokens and self.skip_special_tokens is False:
            raise UserError(
                "spaces_between_special_tokens=false is not supported by this server together with "
                "skip_special_tokens=false",
                param="spaces_between_special_tokens",
            )

    def sampling_params(self, **more: Any) -> SamplingParams:
        """Build SamplingParams from the given fields; `more` overrides them."""
        values = zip(_SAMPLING_NAMES, _sampling_values(self), strict=True)
        given = {name: value for name, value in values if value is not None}
        given["structured_outputs"] = self.to_structured_outputs()
        given["extra_args"] = self.vllm_xargs
        return SamplingParams(**(given | more))


_SAMPLING_NAMES = tuple(
    name for name in SamplingFields.__struct_fields__ if name in {*SamplingParams.__struct_fields__} - {*UNAVAILABLE}
)
_sampling_values = attrgetter(*_SAMPLING_NAMES)
