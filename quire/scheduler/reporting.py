"""What an update tells the front end besides tokens: when things happened, and the logprobs of the prompt."""

from __future__ import annotations

from collections.abc import Mapping

from quire.outputs import RequestTiming, SequenceUpdate
from quire.request import FinishReason, Request, Sequence
from quire.step import PromptLogprobs


def describe(update: SequenceUpdate, request: Request, now: float) -> None:
    """Add the prefix hit and the times, as a first token and an end have them."""
    started = request.first_scheduled_time
    update.num_cached_tokens = request.num_cached_tokens or 0
    update.timing = RequestTiming(
        request.arrival_time, now if started is None else started, now, request.num_preemptions
    )


def attach_prompt_logprobs(
    found: Mapping[int, PromptLogprobs], sequences: list[Sequence], updates: list[SequenceUpdate]
) -> None:
    """Report prompt logprobs (`found`: seq_id -> those of a step) once: recomputation yields them again, after a
    preemption or by the next leader. `sequences`: those of the step."""
    by_id = {sequence.seq_id: sequence for sequence in sequences}
    for seq_id, logprobs in found.items():
        sequence = by_id[seq_id]
        request = sequence.request
        if sequence.finish_reason in (FinishReason.ABORT, FinishReason.TIMEOUT):
            continue
        known = max(request.num_prompt_logprobs, logprobs.start)
        fresh = logprobs.entries[known - logprobs.start :]
        if not fresh:
            continue
        logprobs.start, logprobs.entries = known, fresh
        request.num_prompt_logprobs = known + len(fresh)
        for update in updates:
            if update.request_id == request.request_id and update.index == sequence.index:
                update.prompt_logprobs = logprobs
                break
        else:
            updates.insert(0, SequenceUpdate(request.request_id, sequence.index, [], prompt_logprobs=logprobs))
