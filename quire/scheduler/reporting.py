"""Parts of an update besides tokens: finish reasons, times and prompt logprobs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from quire.decoding.sequence import Request, RequestStatus, Sequence
from quire.outputs import RequestTiming, SequenceUpdate
from quire.request import FinishReason
from quire.scheduler.beam_reorder import hypothesis_updates
from quire.step import PromptLogprobs


def report_times(update: SequenceUpdate, request: Request, now: float, *, can_wait: bool = False) -> None:
    """Add the number of prefix-cache tokens and the request's times to an update with a first token or an end.
    can_wait: the update has neither."""
    started = request.first_scheduled_time
    update.num_cached_tokens = request.num_cached_tokens or 0
    update.timing = RequestTiming(
        request.arrival_time, now if started is None else started, now, request.num_preemptions, can_wait
    )


def report_times_early(update: SequenceUpdate, sequence: Sequence, num_sampled: int, now: float) -> None:
    """Add a request's times to an update. Those neither of a first token nor requested with each token can wait."""
    is_first = num_sampled <= sequence.request.num_prompt_tokens + 1
    report_times(update, sequence.request, now, can_wait=not (is_first or sequence.request.each_step))


def early_end(request: Request, reason: FinishReason, now: float) -> list[SequenceUpdate]:
    """Updates that end a request early (time limit, error). A beam search that runs out of time reports its hypotheses
    so far, a failed one none."""
    search = request.beam_search
    if search is not None and reason is not FinishReason.ERROR:
        search.cut(reason)
        updates = hypothesis_updates(request)
    else:
        ended = [each.index for each in request.live_sequences] if search is None else range(request.params.n)
        updates = [SequenceUpdate(request.request_id, index, [], finish_reason=reason) for index in ended]
    for update in updates:
        report_times(update, request, now)
    return updates


def ended_search(request: Request, now: float) -> list[SequenceUpdate]:
    search = request.beam_search
    if search is not None and search.failure is not None:
        updates = early_end(request, FinishReason.ERROR, now)
        for update in updates:
            update.stop_reason = search.failure
        return updates
    updates = hypothesis_updates(request)
    for update in updates:
        report_times(update, request, now)
    return updates


def pooled_end(sequence: Sequence, vector: list[float], now: float) -> SequenceUpdate:
    request = sequence.request
    update = SequenceUpdate(request.request_id, sequence.index, [], finish_reason=FinishReason.STOP, pooled=vector)
    report_times(update, request, now)
    return update


def live_requests(sequences: Iterable[Sequence], seq_ids: Collection[int]) -> list[Request]:
    """Distinct unfinished requests of these sequences. For ending them at NaN logits."""
    found = dict.fromkeys(sequence.request for sequence in sequences if sequence.seq_id in seq_ids)
    return [request for request in found if request.status is not RequestStatus.FINISHED]


def attach_prompt_logprobs(
    found: Mapping[int, PromptLogprobs], sequences: list[Sequence], updates: list[SequenceUpdate]
) -> None:
    """Attach a step's prompt logprobs (`found`: by seq_id) to the updates, each once. sequences: the step's."""
    by_id = {sequence.seq_id: sequence for sequence in sequences}
    for seq_id, logprobs in found.items():
        sequence = by_id[seq_id]
        request = sequence.request
        if sequence.finish_reason in (FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.ERROR):
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


def ends_in_text(sequence: Sequence, token_id: int) -> bool:
    """True if `token_id`, the last token of an ended sequence, belongs to its text: it completed the constraint, and is
    no end token."""
    is_text = sequence.matcher is not None and sequence.matcher.ends_in_text
    return is_text and token_id not in sequence.request.end_token_ids


def finish_reason(sequence: Sequence, token_id: int) -> tuple[FinishReason, int | None]:
    """(finish reason, stop token for `stop_reason`) of a sequence whose last token is an end token, completes its
    constraint, or reaches its length."""
    request = sequence.request
    if token_id in request.stop_token_ids:
        return FinishReason.STOP, token_id
    if token_id in request.eos_token_ids or (sequence.matcher is not None and sequence.matcher.is_finished):
        return FinishReason.STOP, None
    return FinishReason.LENGTH, None
