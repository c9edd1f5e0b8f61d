"""A request at the engine's door. As the scheduler knows it: quire/decoding/sequence.py."""

from __future__ import annotations

import enum

import msgspec

from quire.adapter_orders import AdapterRef
from quire.prompt_image import PromptImage
from quire.sampling_params import SamplingParams, ThinkingBudget
from quire.step import TokenValues

MAX_PRIORITY = 100
"""Priorities are from -100 to 100: the bound limits how long later requests can come before an earlier one."""


class ResumePoint(msgspec.Struct, frozen=True, array_like=True):
    """How far a request had come in an engine that has ended; another one goes on from there, with the same tokens."""

    token_ids: list[list[int]]
    """The generated tokens of each sequence."""
    ended: list[int]
    """Indices of the sequences that are over."""
    num_prompt_logprobs: int
    """Prompt positions whose logprobs were reported; see `Request.num_prompt_logprobs`."""
    age: float
    """Seconds since the request came in: its place in the order and its time limit count from then."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated, tokenised request. Only the input processor makes these; nothing downstream re-checks them."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """Resolved: never None, never beyond the model's context."""
    seed: int
    """Resolved: `params.seed`, or drawn from the engine's seed."""
    eos_token_ids: list[int] = []
    """Tokens that end the sequence with reason "stop" and `stop_reason` None; empty with `ignore_eos`."""
    bad_token_sequences: list[list[int]] = []
    cache_salt: str = ""
    """Prefix-cache entries are shared only between requests of equal salt."""
    priority: int = 0
    """Lower is earlier; see `Request.order_key`."""
    client: str = ""
    """Whose it is: the waiting requests of several clients take turns (quire/scheduler/fair_order.py)."""
    each_step: bool = False
    """Whether its tokens are sent as each step makes them, also where the engine would send those of several steps at
    once."""
    first_index: int = 0
    """Place of its first sequence in the caller's request, of which this one is a part: seeds count from there."""
    register_prefix: bool = False
    """Keep the prompt's blocks, as the registered prefix `request_id`, when it is computed. Then `max_tokens` is 1."""
    pooling: bool = False
    """Compute the prompt and return its vector (`SequenceUpdate.pooled`), no tokens. Then `max_tokens` is 1, because
    one step samples, and `params` asks for one sequence and no beam search."""
    columns: dict[str, int] = {}
    """Name of a step column -> the request's value, 32 bits (quire/worker/columns.py); 0 for a column that is not here.
    Prefix-cache entries are shared only between requests of equal values."""
    token_columns: dict[str, TokenValues] = {}
    """Name of a step column -> values of tokens of the prompt: the positions of an image's patches. Before them the
    request's value is 0, behind them it is that of `columns`."""
    images: list[PromptImage] = []
    """In the order of the prompt. Prefix-cache entries are shared only between requests of equal images."""
    is_processed: bool = False
    """Whether a logits processor concerns it: it has no drafts, which its processors would have to see one by one."""
    prediction: list[int] = []
    """Tokens that the caller expects to be generated: drafts may come from them."""
    adapter: AdapterRef | None = None
    """None: the model's own. Prefix-cache entries are shared only between requests with adapters of equal content."""
    constraint: str = ""
    """Which tokens it may generate, as the engine core's MaskSource (quire/decoding/masks.py) understands it; empty:
    all."""
    constraint_start: list[int] = []
    """The constraint begins behind these tokens, once they were generated in this order; empty: at once."""
    thinking_budget: ThinkingBudget | None = None
    resume_point: ResumePoint | None = None
    """Set when another engine has run it before. Not with beam search, which reports at its end alone."""


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in OpenAI's words, plus `abort`, `timeout`, `repetition` (SamplingParams says when), and
    `error`: the model computed NaN or infinite logits for it, or for another sequence of its request (or, in metrics,
    its output could not be processed)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    REPETITION = "repetition"
    ERROR = "error"
