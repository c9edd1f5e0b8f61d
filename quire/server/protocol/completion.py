"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.errors import UserError
from quire.sampling_params import SamplingParams
from quire.server.protocol.common import (
    MAX_SEQUENCES,
    UNSUPPORTED_FIELDS,
    Int32,
    PromptLogprobs,
    SamplingFields,
    TokenId,
    Usage,
)

Prompt = str | list[int]

MAX_PROMPTS = 1024


class CompletionRequest(SamplingFields, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """prompt: a string, token ids, a list of strings or a list of token-id lists.

    max_tokens: 0 is allowed with `echo`: the prompt is scored and nothing generated.
    logprobs: number of alternatives; the chosen token's logprob always comes with them.
    """

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: Int32 = 16
    logprobs: Int32 | None = None
    echo: bool = False
    best_of: Int32 | None = None
    add_special_tokens: bool = True

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {**UNSUPPORTED_FIELDS, "suffix": ()}

    def __post_init__(self) -> None:
        self.check_stream_options()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise UserError("best_of is not supported by this server (only the value of n is)", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise UserError("max_tokens must be at least 1, or 0 together with echo", param="max_tokens")
        prompts = self.prompts
        if len(prompts) > MAX_PROMPTS:
            raise UserError(f"at most {MAX_PROMPTS} prompts are allowed in one request", param="prompt")
        if len(prompts) * (self.n or 1) > MAX_SEQUENCES:
            raise UserError(
                f"at most {MAX_SEQUENCES} sequences (prompts times n) are allowed in one request", param="n"
            )

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts one by one. Raises UserError for a list that mixes kinds."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(entry) for entry in self.prompt}
        if kinds == {int}:
            return [self.prompt]  # type: ignore[list-item]
        if kinds not in ({str}, {list}):
            raise UserError("prompt must hold only strings, only token ids or only lists of token ids", param="prompt")
        return self.prompt  # type: ignore[return-value]

    @property
    def skips_special(self) -> bool:
        return self.skip_special_tokens is not False

    def to_sampling_params(self) -> SamplingParams:
        more = {"max_tokens": self.max_tokens or 1, "logprobs": self.logprobs}
        if self.echo and self.logprobs is not None:
            more["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return self.sampling_params(**more)


class CompletionLogprobs(msgspec.Struct):
    """Four columns with one entry per token; the first token of an echoed prompt has no logprob (null)."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """A whole answer, or one chunk of a stream (both have the same `object`)."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
