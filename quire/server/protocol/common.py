"""Types of fields, fields, and usage shared by several endpoints."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.server.protocol.foreign import CHANGES_ANSWER, NO_EFFECT

MAX_STRING = 1024
MAX_SEQUENCES = 4096
"""Maximum sequences (prompts times n) in one request."""

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
MAX_TOKEN_ID = 2**31 - 1
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
Priority = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""Priority; lower is earlier. The server limits its range."""
ShortString = Annotated[str, Meta(max_length=MAX_STRING)]
Identifier = Annotated[str, Meta(pattern=r"^[!-~]{1,128}$(?!\n)")]
r"""Printable ASCII without spaces: safe in a header, a log line and a response id. (Python's `$` alone allows a final
line feed; JSON Schema's regular expressions lack `\Z`.)"""


class RequestStruct(msgspec.Struct, frozen=True):
    """Request body. `UNSUPPORTED`: known but unsupported fields -> harmless values. `NO_EFFECT`: known fields without
    meaning here. `EXTENSIONS`: objects for extensions, whose keys are all unknown fields."""

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {}
    NO_EFFECT: ClassVar[frozenset[str]] = NO_EFFECT
    EXTENSIONS: ClassVar[frozenset[str]] = frozenset({"vllm_xargs"})


class SharedFields(RequestStruct, kw_only=True, frozen=True):
    """Fields common to completions, chats and responses. None means "not given": SamplingParams has the defaults and
    checks."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_STRING)] | None = None
    request_id: Identifier | None = None
    priority: Priority = 0
    user: str | None = None


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
    "lora_request": (),
    "mm_payload": ({},),
    "prompt_embeds": ([],),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "use_beam_search": (False,),
    "watermarking": (False,),
}
"""Known fields of OpenAI and vLLM refused -> harmless values, which are accepted."""


class LoraScale(msgspec.Struct, frozen=True):
    """Scale of an adapter of `GET /lora-adapters`."""

    id: Int32
    scale: float = 0.0


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class SpeculativeDecoding(msgspec.Struct, omit_defaults=True):
    """Drafts of a request, by vLLM's names. Only steps with drafts count; each yields its accepted drafts and one
    token. acceptance_histogram[j]: steps with j accepted drafts. num_spec_tokens: most drafts per step."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET

    @classmethod
    def of(cls, steps: bytes, most: int, *, is_detailed: bool) -> SpeculativeDecoding:
        """Counts from a request's steps. steps: `RequestMetrics.draft_steps`."""
        drafted, accepted = list(steps[::2]), list(steps[1::2])
        num_steps, num_drafts, num_accepted = len(drafted), sum(drafted), sum(accepted)
        return cls(
            mean_acceptance_length=1 + num_accepted / num_steps if num_steps else 1.0,
            draft_acceptance_rate=num_accepted / num_drafts if num_drafts else 0.0,
            acceptance_histogram=[accepted.count(number) for number in range(most + 1)],
            num_spec_steps=num_steps,
            num_accepted_draft_tokens=num_accepted,
            num_draft_tokens=num_drafts,
            num_spec_tokens=most,
            per_step_accepted=accepted if is_detailed else UNSET,
            per_step_drafted=drafted if is_detailed else UNSET,
        )


class AnswerTimes(msgspec.Struct, omit_defaults=True):
    """Durations in milliseconds of a request's phases, and its speed. generation_time_ms: from the first token.
    tokens_per_second: first step to last token."""

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    speculative_decoding: SpeculativeDecoding | None = None


class CompletionTokensDetails(msgspec.Struct, omit_defaults=True):
    """Part of `usage`. reasoning_tokens: only for models that reason. Others: only for requests with a prediction."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    """Tokens of one request; a prompt counts once for all its completions. completion_tokens_details: only with
    reasoning or a prediction."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @property
    def num_cached(self) -> int:
        return self.prompt_tokens_details.cached_tokens

    @property
    def num_reasoning(self) -> int:
        details = self.completion_tokens_details
        return 0 if details is UNSET or details.reasoning_tokens is UNSET else details.reasoning_tokens


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
