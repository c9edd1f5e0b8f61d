"""Outputs of the engine core (SequenceUpdate) and of the user's API."""

from __future__ import annotations

import msgspec

from quire.errors import ModelOutputError, UserError
from quire.request import FinishReason
from quire.step import PromptLogprobs, TokenLogprobs


class SequenceUpdate(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one sequence after one step, or its end, from the engine core. Never in a cycle."""

    request_id: str
    index: int
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per new token, where requested."""
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """Stop token that ended the sequence, if one of `stop_token_ids`. With FinishReason.ERROR: why the constraint or a
    logits processor ended it; None: the logits were not finite."""
    ends_in_text: bool = False
    """With FinishReason.STOP: the last token belongs to the text, because the constraint allows no further one."""
    num_cached_tokens: int = 0
    timing: RequestTiming | None = None
    """Times, with the first token, the end, and every token of a request with stop strings."""
    ranking: tuple[float, float] | None = None
    """(cumulative log-probability, score) of a beam-search hypothesis, which comes whole. An end without it: no
    hypothesis has this index."""
    pooled: list[float] | None = None
    """Pooled request's vector (float32), set with the end."""
    drafts: bytes = b""
    """Two bytes for each step with drafts: those computed, those accepted."""


class RequestTiming(msgspec.Struct, array_like=True):
    """Seconds on the engine core's clock; only differences mean anything."""

    arrival: float
    first_scheduled: float
    """Equal to `now` when a time limit ended the request before it ran."""
    now: float
    num_preemptions: int = 0
    can_wait: bool = False
    """True for updates without first token or end: they may be sent with later ones."""


class Logprob(msgspec.Struct):
    """One alternative: its log-probability, 1-based rank in the vocabulary, and text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct):
    """One completion. `text` and `token_ids` are cumulative, or (`delta`) new since the last output. score:
    cumulative_logprob / tokens ** length_penalty, which orders the hypotheses of a beam search."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct):
    """Times of a request in seconds. `queue_time`: arrival to first scheduled; the others count from arrival."""

    queue_time: float = 0.0
    time_to_first_token: float = 0.0
    latency: float = 0.0
    num_preemptions: int = 0
    draft_steps: bytes = b""
    """Two bytes (`SequenceUpdate.drafts`) for each step with drafts; set with the last output."""


class RequestOutput(msgspec.Struct):
    """State of one request. `finished` is True in the last one."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = msgspec.field(default_factory=RequestMetrics)
    pooled: list[float] | None = None


PROCESSOR_FAILED = "the logits processor "
"""First words of the stop reason of a sequence that a logits processor has ended."""


def is_damaged(output: RequestOutput) -> bool:
    for completion in output.outputs:  # a loop, since it is asked of every output
        if completion.finish_reason is not None and completion.finish_reason == FinishReason.ERROR:
            return True
    return False


def raise_if_nonfinite(output: RequestOutput) -> None:
    """Raise, for offline callers, ModelOutputError for a request that ended because of NaN or infinite logits or a
    failed logits processor, and UserError for one that could not continue under its constraint."""
    if not is_damaged(output):
        return
    for completion in output.outputs:
        if completion.finish_reason == FinishReason.ERROR and isinstance(completion.stop_reason, str):
            if completion.stop_reason.startswith(PROCESSOR_FAILED):
                raise ModelOutputError(completion.stop_reason)
            raise UserError(completion.stop_reason, param="structured_outputs")
    raise ModelOutputError("the model computed NaN or infinite logits for this request; the engine's log says more")
