"""Drafts: tokens that a step computes behind a sequence's last one, before it is known whether they are its own.

The scheduler asks a `Drafter`, counts the drafts like tokens, and corrects its counts when a result says how many the
workers accepted (quire/step.py). Queue depth does not matter: while drafts are in flight, the scheduler's counts are
upper bounds, and the workers know the truth.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from quire.kv_cache.manager import KVCacheManager
from quire.request import Sequence
from quire.step import StepPlan


class Drafts(NamedTuple):
    """The drafts of one sequence in one step."""

    num_tokens: int
    token_ids: list[int] | None = None
    """None: the workers propose them, at most `num_tokens`."""


NO_DRAFTS = Drafts(0)


class Drafter(Protocol):
    """Proposes drafts for sequences that are about to compute their last token. Beams have none."""

    max_drafts: int
    """Most drafts of a sequence in one step; 0: `propose` is never called."""

    def propose(self, sequence: Sequence, limit: int) -> Drafts:
        """At most `limit` (>= 1) drafts. Tokens of its own it can propose only for a sequence whose tokens are all
        known (`num_pending_tokens` is 0): otherwise None or no drafts."""
        ...


class NoDrafter:
    """Every step computes known tokens."""

    max_drafts = 0

    def propose(self, sequence: Sequence, limit: int) -> Drafts:
        return NO_DRAFTS


NO_DRAFTER = NoDrafter()


def take_back_rejected(
    plan: StepPlan, samples: list[Sequence], token_ids: list[list[int]], kv: KVCacheManager
) -> dict[int, int]:
    """Correct the counts of the sequences with drafts in a plan, now that its result says how many were accepted, and
    free the blocks that they no longer need. Returns seq_id -> blocks kept, where some were freed.

    samples, token_ids: aligned with the plan's `sample_seq_ids`.
    """
    trimmed = {}
    for sequence, source, accepted in zip(samples, plan.sample_from, token_ids, strict=True):
        num_drafts = plan.num_drafts[source]
        sequence.num_pending_tokens -= num_drafts
        sequence.num_pending_drafts -= num_drafts
        num_rejected = num_drafts + 1 - len(accepted)
        # Without blocks it has ended, or was preempted: then it computes all tokens again once none is in flight.
        if num_rejected and sequence.blocks is not None:
            sequence.num_computed_tokens -= num_rejected
            if kv.trim(sequence.blocks, sequence.num_computed_tokens):
                trimmed[sequence.seq_id] = sequence.blocks.capacity // kv.block_size
    return trimmed


def until_end(sequence: Sequence, token_ids: list[int]) -> list[int]:
    """The tokens of one step up to the first that ends the sequence, as `max_tokens` or as an end token."""
    token_ids = token_ids[: sequence.max_total_tokens - len(sequence.token_ids)]
    ends = sequence.request.end_token_ids
    return next((token_ids[: number + 1] for number, token in enumerate(token_ids) if token in ends), token_ids)
