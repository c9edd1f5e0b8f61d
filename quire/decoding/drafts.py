"""Drafts: guessed tokens that a step computes after a sequence's last one.

The scheduler asks a `Drafter`, counts drafts like tokens, and corrects its counts by the number accepted
(quire/step.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from quire.decoding.draft_numbers import FIRST_CHANCE, DraftRecord, StepTimes
from quire.decoding.masks import drafts_behind
from quire.decoding.sequence import Sequence
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.stats import EngineStats
from quire.step import StepPlan, StepResult

SHARE_OF_ONE = 1 / 16
"""Weight of one trial in the expectation of new sequences."""


class Drafts(NamedTuple):
    """Proposed drafts of one sequence in one step: tokens, or their number if the workers know them."""

    num_tokens: int
    token_ids: list[int] | None = None
    """Drafts; None: the workers propose at most `num_tokens` themselves."""


NO_DRAFTS = Drafts(0)


class Drafter(Protocol):
    """Source of drafts for sequences about to compute their last token. Beams have none."""

    max_drafts: int
    """Maximum drafts of a sequence in one step; 0: `propose` is never called."""
    asks_always: bool
    """False: `propose` is not called for a sequence without `num_found_drafts`, which takes the fast path."""

    def propose(self, sequence: Sequence, limit: int, batch_size: int) -> Drafts:
        """Propose at most `limit` (>= 1) drafts while `batch_size` sequences run. If some tokens of the sequence are
        unknown (`num_pending_tokens` > 0), the drafts have no `token_ids`, or there are none."""
        ...

    def note_step(self, samples: list[Sequence], plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Store the workers' drafts for the next step. seconds: since the last result."""
        ...


class NoDrafter:
    """Drafter of an engine without speculation: proposes none."""

    max_drafts = 0
    asks_always = False

    def propose(self, sequence: Sequence, limit: int, batch_size: int) -> Drafts:
        return NO_DRAFTS

    def note_step(self, samples: list[Sequence], plan: StepPlan, result: StepResult, seconds: float) -> None:
        pass


NO_DRAFTER = NoDrafter()


class WorkerDrafts:
    """Drafter for drafts that the workers make. Each result says which sequences have drafts; for a constrained
    sequence the workers send them, and the scheduler proposes them when their masks are known."""

    asks_always = False

    def __init__(
        self, max_drafts: int, by_batch_size: SequenceOf[tuple[int, int]] = (), *, adapts: bool = True
    ) -> None:
        """Drafter whose drafts the workers look up. Parameters: see SpeculationConfig."""
        self.max_drafts = max_drafts
        self._ends = [end for end, _ in by_batch_size]
        self._numbers = [number for _, number in by_batch_size]
        self._adapts = adapts
        self._chance = FIRST_CHANCE
        """Chance expected of a new sequence."""
        self._times = StepTimes()

    def propose(self, sequence: Sequence, limit: int, batch_size: int) -> Drafts:
        if self._ends:
            limit = min(limit, self._numbers[min(bisect_left(self._ends, batch_size), len(self._ends) - 1)])
        limit = min(limit, sequence.num_found_drafts)
        if limit and self._adapts:
            if sequence.draft_record is None:
                sequence.draft_record = DraftRecord(self.max_drafts, self._chance, self._times)
            limit = min(limit, sequence.draft_record.limit(batch_size))
            self._chance += SHARE_OF_ONE * (sequence.draft_record.chance - self._chance)
        if sequence.request.constraint is None:
            return Drafts(limit)
        token_ids = sequence.draft_token_ids[:limit]
        return Drafts(len(token_ids), token_ids)

    def note_step(self, samples: list[Sequence], plan: StepPlan, result: StepResult, seconds: float) -> None:
        are_wanted = True
        if self._adapts:
            number = len(samples)
            decodes_only = len(plan.num_tokens) == number == sum(plan.num_tokens) - sum(plan.num_drafts)
            if decodes_only:
                self._times.note(number, result.num_drafts, seconds)
            records = (samples[index].draft_record for index in result.found_drafts)
            chances = [self._chance if record is None else record.chance for record in records]
            self._times.set_price(number, chances, self.max_drafts)
            are_wanted = not (decodes_only and self._times.wants_plain(number))
        note_found_drafts(samples, result, are_wanted=are_wanted)


def note_found_drafts(samples: list[Sequence], result: StepResult, *, are_wanted: bool = True) -> None:
    """Store how many drafts the workers have for each sequence's next step."""
    for index, sequence in enumerate(samples):
        num_found, record = result.found_drafts.get(index, 0), sequence.draft_record
        if num_found and are_wanted and (record is None or record.wants_trial(len(samples))):
            sequence.fast_path_until = 0
        else:
            num_found = 0
        sequence.num_found_drafts = num_found
        if sequence.request.constraint is not None:
            sequence.draft_token_ids = result.draft_token_ids.get(index, []) if num_found else []


def count_drafts(stats: EngineStats, plan: StepPlan, result: StepResult) -> None:
    stats.draft_tokens_total += result.num_drafts
    stats.drafts_total += sum(plan.num_drafts[source] > 0 for source in plan.sample_from)
    counts = list(stats.accepted_drafts_by_position)  # a new list: snapshots hold the old one
    counts += [0] * (max(plan.num_drafts) - len(counts))
    for length, number in Counter(map(len, result.token_ids)).items():
        for position in range(length - 1):
            counts[position] += number
        stats.accepted_draft_tokens_total += number * max(0, length - 1)
    stats.accepted_drafts_by_position = counts


def take_masked_drafts(sequence: Sequence) -> None:
    """Keep a constrained sequence's drafts behind the tokens that its grammar forced, if they agree."""
    assert sequence.matcher is not None, "it has answered"
    sequence.draft_token_ids = drafts_behind(sequence.matcher.forced, sequence.draft_token_ids)
    sequence.num_found_drafts = len(sequence.draft_token_ids)


def propose_drafts(drafter: Drafter, sequence: Sequence, budget: int, max_chunk: int, batch_size: int) -> Drafts:
    """Drafts for a running sequence about to compute its last token. budget: tokens that the sequence may have in the
    step, including that one. batch_size: running sequences."""
    request = sequence.request
    if request.beam_search is not None or request.fork_position is not None or request.pooling or request.is_processed:
        return NO_DRAFTS
    if request.constraint is not None and sequence.num_pending_tokens:
        return NO_DRAFTS  # masks after drafts need all tokens before the drafts
    known = len(sequence.token_ids) + sequence.num_pending_tokens
    # All tokens computed after a known one count as one chunk: sliding windows hold blocks for a chunk.
    num_free = min(budget, max_chunk - sequence.num_pending_drafts, sequence.max_total_tokens - known)
    limit = min(drafter.max_drafts, num_free - 1)
    if request.params.num_speculative_tokens is not None:
        limit = min(limit, request.params.num_speculative_tokens)
    return drafter.propose(sequence, limit, batch_size) if limit > 0 else NO_DRAFTS


def take_back_rejected(
    plan: StepPlan, samples: list[Sequence], token_ids: list[list[int]], kv: KVCacheManager
) -> dict[int, list[int]]:
    """Correct the counts of sequences with rejected drafts or discarded samples, and free blocks that they no longer
    need. Returns seq_id -> table entries kept per KV group, for sequences with freed blocks.

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
        if num_drafts and accepted:
            sequence.draft_step = bytes((num_drafts, len(accepted) - 1))
            if sequence.draft_record is not None:
                sequence.draft_record.note(num_drafts, len(accepted) - 1)
        num_rejected = num_drafts + 1 - len(accepted)
        # A sequence without blocks has ended, or was preempted and computes all tokens again.
        if num_rejected and sequence.blocks is not None:
            sequence.num_computed_tokens -= num_rejected
            kept = kv.trim(sequence.blocks, sequence.num_computed_tokens)
            if kept:
                trimmed[sequence.seq_id] = kept
    return trimmed


def take_back_token(sequence: Sequence, kv: KVCacheManager) -> dict[int, list[int]]:
    """Let a sequence compute its last token again, whose sample had no mask. Returns the same as
    `take_back_rejected`."""
    if sequence.blocks is None:
        sequence.num_computed_tokens -= sequence.swapped is not None
        return {}
    sequence.num_computed_tokens -= 1
    kept = kv.trim(sequence.blocks, sequence.num_computed_tokens)
    return {sequence.seq_id: kept} if kept else {}


def take_accepted(sequence: Sequence, token_ids: list[int], kv: KVCacheManager) -> list[int]:
    """Append the tokens of a step with accepted drafts, up to the one that ends the sequence (`max_tokens` or an end
    token), and offer the filled blocks to the prefix index. Returns the appended tokens."""
    token_ids = token_ids[: sequence.max_total_tokens - len(sequence.token_ids)]
    ends = sequence.request.end_token_ids
    if ends and any(token in ends for token in token_ids):
        token_ids = next(token_ids[: number + 1] for number, token in enumerate(token_ids) if token in ends)
    sequence.token_ids += token_ids
    if sequence.blocks is not None:
        kv.cache_blocks(sequence.blocks, sequence.token_ids, len(sequence.token_ids) - 1)
    return token_ids
