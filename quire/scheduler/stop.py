"""When a sequence ends. Stop strings are not here: only the front end has text."""

from __future__ import annotations

from quire.request import FinishReason, Sequence


def finish_reason(sequence: Sequence, token_id: int) -> tuple[FinishReason, int | None]:
    """Why a sequence ends with `token_id`, which is an end token or has made it as long as it may be: (reason, stop
    token reported as `stop_reason`).

    The sampler bans end tokens before `min_tokens`, so reaching one always ends the sequence.
    """
    request = sequence.request
    if token_id in request.stop_token_ids:
        return FinishReason.STOP, token_id
    if token_id in request.eos_token_ids:
        return FinishReason.STOP, None
    return FinishReason.LENGTH, None
