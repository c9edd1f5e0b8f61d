"""Requests at the engine's door. quire/decoding/sequence.py has the scheduler's view."""

from __future__ import annotations

import enum

import msgspec

from quire.adapter_orders import AdapterRef
from quire.prompt_image import PromptImage
from quire.sampling_params import SamplingParams, ThinkingBudget
from quire.step import TokenValues

MAX_PRIORITY = 100
"""Limit of priorities, of either sign, and so of the time for which a request can be overtaken."""
BACKGROUND_LEVEL = 1000
"""Added to the priority of background requests: worse than all others."""
BACKGROUND_SECONDS = 1e9
"""Lateness of background requests in the order of service: thirty years."""


class ResumePoint(msgspec.Struct, frozen=True, array_like=True):
    """Progress of a request in an engine that has ended. Another engine continues from it, with the same tokens."""

    token_ids: list[list[int]]
    """Generated tokens of each sequence."""
    ended: list[int]
    """Indices of the finished sequences."""
    num_prompt_logprobs: int
    """Prompt positions whose logprobs were reported; see `Request.num_prompt_logprobs`."""
    age: float
    """Seconds since the arrival, from which its place in the order and its time limit count."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Validated, tokenised request, for the engine core. Only the input processor makes them; nothing downstream checks
    them again. Requests share prefix-cache entries only if their salts, columns, images and contents of adapters are
    equal."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """Limit on new tokens, within the model's context."""
    seed: int
    """Resolved: `params.seed`, or drawn from the engine's seed."""
    eos_token_ids: list[int] = []
    """Tokens that end the sequence with reason "stop" and `stop_reason` None."""
    bad_token_sequences: list[list[int]] = []
    cache_salt: str = ""
    priority: int = 0
    """Lower is earlier; see `Request.order_key`."""
    is_background: bool = False
    """Comes after all other requests, whatever its priority and age, and is preempted for them."""
    client: str = ""
    """Client's name. Waiting requests of several clients take turns (quire/scheduler/fair_order.py)."""
    each_step: bool = False
    """Each step's tokens are sent at once, never collected over steps."""
    first_index: int = 0
    """Index of its first sequence in the caller's request, from which seeds count."""
    register_prefix: bool = False
    """Keep the computed prompt's blocks as the registered prefix `request_id`. Then `max_tokens` is 1."""
    pooling: bool = False
    """Compute the prompt and return its vector (`SequenceUpdate.pooled`), no tokens. Then `max_tokens` is 1, and
    `params` asks for one sequence without beam search."""
    columns: dict[str, int] = {}
    """Step column -> the request's 32-bit value (quire/worker/columns.py); missing columns are 0."""
    token_columns: dict[str, TokenValues] = {}
    """Step column -> values of prompt tokens, such as image positions. Tokens before them have 0, those after them the
    value of `columns`."""
    images: list[PromptImage] = []
    """Images in the prompt's order."""
    is_processed: bool = False
    """Logits processor sees the tokens one by one, so the request has no drafts."""
    prediction: list[int] = []
    """Tokens that the caller expects; drafts may come from them."""
    adapter: AdapterRef | None = None
    constraint: str = ""
    """Constraint on the generated tokens, as MaskSource (quire/decoding/masks.py) reads it."""
    constraint_start: list[int] = []
    """Generated tokens after which the constraint begins; empty: it begins at once."""
    thinking_budget: ThinkingBudget | None = None
    resume_point: ResumePoint | None = None
    """Progress in another engine that ran the request before; None with beam search."""

    @property
    def level(self) -> int:
        """Priority for comparisons between requests; background requests have the worst ones. Lower runs first."""
        return self.priority + (BACKGROUND_LEVEL if self.is_background else 0)


class FinishReason(enum.StrEnum):
    """Reason of a sequence's end, in OpenAI's words, plus `abort`, `timeout`, `repetition` (see SamplingParams) and
    `error`: NaN or infinite logits for the sequence or another of its request (in metrics also an output that could not
    be processed)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    REPETITION = "repetition"
    ERROR = "error"
