"""Drafts: tokens that a step computes behind a sequence's last one, before it is known whether they are its own.

The scheduler asks a `Drafter`, counts the drafts like tokens, and corrects its counts when a result says how many the
workers accepted (quire/step.py). Queue depth does not matter: while drafts are in flight, the scheduler's counts are
upper bounds, and the workers know the truth.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from quire.decoding.masks import drafts_behind
from quire.decoding.sequence import Sequence
from quire.kv_cache.manager import KVCacheManager
from quire.step import StepPlan, StepResult


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
    asks_always: bool
    """Whether `propose` is called for every token. Else it is not for a sequence without `num_found_drafts`, which
    takes the fast path."""

    def propose(self, sequence: Sequence, limit: int) -> Drafts:
        """At most `limit` (>= 1) drafts. Tokens of its own it can propose only for a sequence whose tokens are all
        known (`num_pending_tokens` is 0): otherwise None or no drafts."""
        ...


class NoDrafter:
    """Every step computes known tokens."""

    max_drafts = 0
    asks_always = False

    def propose(self, sequence: Sequence, limit: int) -> Drafts:
        return NO_DRAFTS


NO_DRAFTER = NoDrafter()


class WorkerDrafts:
    """The workers make the drafts, of tokens that the scheduler need not know, and say with each result for which
    sequences they have any. Where they have none, steps are planned as without drafts. Of a sequence under a
    constraint they tell the drafts, which the scheduler proposes when the masks behind them are known."""

    asks_always = False

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts

    def propose(self, sequence: Sequence, limit: int) -> Drafts:
        if sequence.request.constraint is None:
            return Drafts(min(limit, sequence.num_found_drafts))
        token_ids = sequence.draft_token_ids[:limit]
        return Drafts(len(token_ids), token_ids)


def note_found_drafts(samples: list[Sequence], result: StepResult) -> None:
    """Note which drafts the workers have for the sequences of a result."""
    for index, sequence in enumerate(samples):
        sequence.num_found_drafts = num_found = result.found_drafts.get(index, 0)
        if num_found:
            sequence.fast_path_until = 0
        if sequence.request.constraint is not None:
            sequence.draft_token_ids = result.draft_token_ids.get(index, [])


def take_masked_drafts(sequence: Sequence) -> None:
    """Keep of the drafts of a sequence under a constraint what is left behind the tokens that its matcher forced."""
    assert sequence.matcher is not None, "it has answered"
    sequence.draft_token_ids = drafts_behind(sequence.matcher.forced, sequence.draft_token_ids)
    sequence.num_found_drafts = len(sequence.draft_token_ids)


def propose_drafts(drafter: Drafter, sequence: Sequence, budget: int, max_chunk: int) -> Drafts:
    """Drafts for a running sequence that computes its last token. budget: tokens of the step that it may have, that one
    included."""
    request = sequence.request
    if request.beam_search is not None or request.fork_position is not None or request.pooling:
        return NO_DRAFTS
    if request.constraint is not None and sequence.num_pending_tokens:
        return NO_DRAFTS  # masks behind drafts are made when all tokens before these are known
    known = len(sequence.token_ids) + sequence.num_pending_tokens
    # All that may be computed behind a known token counts as one chunk: sliding windows hold blocks for that much.
    num_free = min(budget, max_chunk - sequence.num_pending_drafts, sequence.max_total_tokens - known)
    limit = min(drafter.max_drafts, num_free - 1)
    return drafter.propose(sequence, limit) if limit > 0 else NO_DRAFTS


def take_back_rejected(
    plan: StepPlan, samples: list[Sequence], token_ids: list[list[int]], kv: KVCacheManager
) -> dict[int, list[int]]:
    """Correct the counts of the sequences with drafts in a plan, now that its result says how many were accepted, and
    of those whose samples were discarded, and free the blocks that they no longer need. Returns seq_id -> table entries
    kept per KV group, where some were freed.

    samples, token_ids: aligned with the plan's `sample_seq_ids`.
    """
    trimmed = {}
    for sequence, source, accepted in zip(samples, plan.sample_from, token_ids, strict=True):
        num_drafts = plan.num_drafts[source] if plan.num_drafts else 0
        if not num_drafts and (accepted or sequence.request.pooling):
            continue
        sequence.num_pending_tokens -= num_drafts
        sequence.num_pending_drafts -= num_drafts
        sequence.fast_path_until = 0
        num_rejected = num_drafts + 1 - len(accepted)
        # Without blocks it has ended, or was preempted: then it computes all tokens again once none is in flight.
        if num_rejected and sequence.blocks is not None:
            sequence.num_computed_tokens -= num_rejected
            kept = kv.trim(sequence.blocks, sequence.num_computed_tokens)
            if kept:
                trimmed[sequence.seq_id] = kept
    return trimmed


def take_back_token(sequence: Sequence, kv: KVCacheManager) -> dict[int, list[int]]:
    """Let a sequence, whose sample is discarded, compute its last token again. Returns as `take_back_rejected`."""
    if sequence.blocks is None:
        sequence.num_computed_tokens -= sequence.swapped is not None
        return {}
    sequence.num_computed_tokens -= 1
    kept = kv.trim(sequence.blocks, sequence.num_computed_tokens)
    return {sequence.seq_id: kept} if kept else {}


def take_accepted(sequence: Sequence, token_ids: list[int], kv: KVCacheManager) -> list[int]:
    """Append the tokens of a step with accepted drafts up to the first that ends the sequence, as `max_tokens` or as an
    end token, and offer the blocks that they fill to the prefix index. Returns what was appended."""
    token_ids = token_ids[: sequence.max_total_tokens - len(sequence.token_ids)]
    ends = sequence.request.end_token_ids
    token_ids = next((token_ids[: number + 1] for number, token in enumerate(token_ids) if token in ends), token_ids)
    sequence.token_ids += token_ids
    if sequence.blocks is not None:
        kv.cache_blocks(sequence.blocks, sequence.token_ids, len(sequence.token_ids) - 1)
    return token_ids
