"""When a sequence ends. Stop strings are not here: only the front end has text."""

from __future__ import annotations

from quire.request import FinishReason, Sequence


def finish_reason(sequence: Sequence, token_id: int) -> tuple[FinishReason, int | None] | None:
    """Decide after `token_id` was appended: (reason, stop token reported as `stop_reason`), or None to go on.

    The sampler bans end tokens before `min_tokens`, so reaching one here always ends the sequence.
    """
    request = sequence.request
    if token_id in request.stop_token_ids:
        return FinishReason.STOP, token_id
    if token_id in request.eos_token_ids:
        return FinishReason.STOP, None
    if len(sequence.token_ids) >= sequence.max_total_tokens:
        return FinishReason.LENGTH, None
    return None
