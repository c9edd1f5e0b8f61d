"""What comes out: SequenceUpdate (engine core to front end), RequestOutput and CompletionOutput (to the user)."""

from __future__ import annotations

import msgspec

from quire.errors import ModelOutputError, UserError
from quire.request import FinishReason
from quire.step import PromptLogprobs, TokenLogprobs


class SequenceUpdate(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one sequence after one step, or its end. It is part of no cycle, and there is one for every row and
    step: the garbage collector need not know it."""

    request_id: str
    index: int
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per new token, where asked for."""
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token that ended it, when it was one of `stop_token_ids`. With FinishReason.ERROR, why the sequence
    cannot go on under its constraint; None there: the model's logits were not finite."""
    ends_in_text: bool = False
    """With FinishReason.STOP: its last token is part of the text, because a constraint allows nothing behind it."""
    num_cached_tokens: int = 0
    timing: RequestTiming | None = None
    """Set with the first token, with the finish, and with every token of a request that has stop strings."""
    ranking: tuple[float, float] | None = None
    """Of a hypothesis of a beam search: (cumulative log-probability, score). It comes whole, with its end; an end
    without it says that there is no hypothesis of this index."""
    pooled: list[float] | None = None
    """Of a pooled request, with its end: its vector, of float32 values."""
    drafts: tuple[int, int] | None = None
    """Drafts that its step computed, and how many of them were accepted; None: it had none."""


class RequestTiming(msgspec.Struct, array_like=True):
    """Seconds on the engine core's clock; only differences mean anything."""

    arrival: float
    first_scheduled: float
    """Equal to `now` when a time limit ended the request before it ever ran."""
    now: float
    num_preemptions: int = 0
    can_wait: bool = False
    """Neither the first token nor the end: it may be sent with those of later steps."""


class Logprob(msgspec.Struct):
    """One alternative: its log-probability, 1-based rank in the vocabulary, and text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct):
    """One completion. `text` and `token_ids` are cumulative, or what is new since the last output (`delta`).

    score: of a beam search, cumulative_logprob / tokens ** length_penalty, by which the completions are ordered.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None

    def finished(self) -> bool:
        """Whether nothing more comes."""
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct):
    """Seconds. `queue_time`: arrival to first scheduled; the others count from arrival."""

    queue_time: float = 0.0
    time_to_first_token: float = 0.0
    latency: float = 0.0
    num_preemptions: int = 0
    draft_steps: bytes = b""
    """Set with the last output: two bytes for each step that had drafts, as those of `SequenceUpdate.drafts`."""


class RequestOutput(msgspec.Struct):
    """The state of one request. `finished` is True in the last one."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = msgspec.field(default_factory=RequestMetrics)
    pooled: list[float] | None = None
    """Of a pooled request, in its last output: the model's vector, as `SequenceUpdate` has it."""


PROCESSOR_FAILED = "the logits processor "
"""Begins the reason of a sequence that a logits processor has ended."""


def is_damaged(output: RequestOutput) -> bool:
    """Whether a request ended in an error."""
    for completion in output.outputs:  # a loop, since it is asked of every output
        if completion.finish_reason is not None and completion.finish_reason == FinishReason.ERROR:
            return True
    return False


def raise_if_nonfinite(output: RequestOutput) -> None:
    """Raise ModelOutputError for a request that ended because the model computed NaN or infinite logits, or a logits
    processor failed, and UserError for one that could not go on under its constraint (structured outputs)."""
    if not is_damaged(output):
        return
    for completion in output.outputs:
        if completion.finish_reason == FinishReason.ERROR and isinstance(completion.stop_reason, str):
            if completion.stop_reason.startswith(PROCESSOR_FAILED):
                raise ModelOutputError(completion.stop_reason)
            raise UserError(completion.stop_reason, param="structured_outputs")
    raise ModelOutputError("the model computed NaN or infinite logits for this request; the engine's log says more")
