"""POST /v1/completions."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from quire.errors import UserError
from quire.sampling_params import SamplingParams
from quire.server.protocol.common import (
    BEAM_SEARCH_FIELDS,
    MAX_SEQUENCES,
    UNSUPPORTED_FIELDS,
    AnswerTimes,
    Int32,
    PromptLogprobs,
    TokenId,
    Usage,
)
from quire.server.protocol.sampling import SamplingFields

Prompt = str | list[int]

MAX_PROMPTS = 1024
NO_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty."
"""vLLM's message, which programs look for."""


class CompletionRequest(SamplingFields, kw_only=True, frozen=True):
    """Body of a completion. prompt: string, token ids, or a list of either. max_tokens: 0 is allowed with `echo`: score
    the prompt. logprobs: number of alternatives besides the chosen token. best_of: completions to generate; the n
    likeliest are returned. use_beam_search: search with `beam_width` beams (or best_of, or n) and return the n best
    hypotheses. Neither can be streamed. suffix: text after the completion."""

    prompt: str | list[str | TokenId | list[TokenId]] = ""
    max_tokens: Int32 = 16
    logprobs: Int32 | None = None
    echo: bool = False
    best_of: Int32 | None = None
    use_beam_search: bool = False
    beam_width: Int32 | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    add_special_tokens: bool = True
    suffix: str = ""

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        name: values for name, values in UNSUPPORTED_FIELDS.items() if name not in BEAM_SEARCH_FIELDS
    }

    def __post_init__(self) -> None:
        self.check_listed(self.logprobs is not None)
        self.check_stream_options()
        self.check_special_tokens()
        self._check_ranking()
        if self.max_tokens == 0 and not self.echo:
            raise UserError("max_tokens must be at least 1, or 0 together with echo", param="max_tokens")
        if not self.prompt:
            raise UserError(NO_PROMPT, param="prompt")
        prompts = self.prompts
        if self.suffix and not isinstance(prompts[0], str):
            raise UserError("suffix needs a prompt that is a text", param="suffix")
        if len(prompts) > MAX_PROMPTS:
            raise UserError(f"at most {MAX_PROMPTS} prompts are allowed in one request", param="prompt")
        name, num_sequences = self._num_sequences
        if len(prompts) * num_sequences > MAX_SEQUENCES:
            raise UserError(
                f"at most {MAX_SEQUENCES} sequences (prompts times {name}) are allowed in one request", param=name
            )

    def _check_ranking(self) -> None:
        if not self.use_beam_search and self.beam_width is not None:
            raise UserError("beam_width needs use_beam_search", param="beam_width")
        if self.beam_width is not None and self.best_of not in (None, self.beam_width):
            raise UserError("beam_width and best_of mean the same: give one of them", param="best_of")
        if self.use_beam_search and self.max_tokens == 0:
            raise UserError("max_tokens must be at least 1 with use_beam_search", param="max_tokens")
        if self.stream and self.use_beam_search:
            raise UserError("beam search cannot be streamed: its answer is known at its end", param="stream")
        if self.stream and self._num_sequences[1] > (self.n or 1):
            raise UserError("best_of greater than n cannot be streamed", param="stream")

    @property
    def _num_sequences(self) -> tuple[str, int]:
        given = ((name, getattr(self, name)) for name in ("beam_width", "best_of", "n"))
        return next(((name, value) for name, value in given if value is not None), ("n", 1))

    @property
    def prompts(self) -> list[Prompt]:
        """List of prompts. Raises UserError for mixed kinds."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(entry) for entry in self.prompt}
        if kinds == {int}:
            return [self.prompt]  # type: ignore[list-item]
        if kinds not in ({str}, {list}):
            raise UserError("prompt must hold only strings, only token ids or only lists of token ids", param="prompt")
        return self.prompt  # type: ignore[return-value]

    @property
    def tokenises_prompts(self) -> bool:
        """True if the server tokenizes the prompts instead of the engine."""
        return not self.add_special_tokens or bool(self.suffix) or self.repeats_prompts

    @property
    def repeats_prompts(self) -> bool:
        """True if the answer has an entry for each prompt token."""
        return self.echo or self.return_token_ids or self.prompt_logprobs is not None

    @property
    def skips_special(self) -> bool:
        return self.skip_special_tokens is not False

    def to_sampling_params(self) -> SamplingParams:
        num_best = 0 if self.logprob_token_ids else self.logprobs
        more: dict[str, Any] = {"max_tokens": self.max_tokens or 1, "logprobs": num_best}
        if self.echo and self.logprobs is not None:
            wanted = (self.logprobs, self.prompt_logprobs or 0)
            more["prompt_logprobs"] = -1 if -1 in wanted else max(wanted)
        for name in ("best_of", "use_beam_search", "length_penalty", "early_stopping"):
            if (value := getattr(self, name)) is not None:
                more[name] = value
        if self.beam_width is None:
            return self.sampling_params(**more)
        try:
            return self.sampling_params(**(more | {"best_of": self.beam_width}))
        except UserError as error:
            if error.param != "best_of":
                raise
            raise UserError(error.message.replace("best_of", "beam_width"), param="beam_width") from None


class CompletionLogprobs(msgspec.Struct):
    """Four columns with one entry per token; an echoed prompt's first token has no log-probability (null)."""

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
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """Whole answer or chunk of a stream (both have the same `object`). Fields absent from a chunk are null in a whole
    answer, where clients look for them."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: AnswerTimes | UnsetType | None = UNSET
    service_tier: UnsetType | None = UNSET
    kv_transfer_params: UnsetType | None = UNSET
