"""Matchers without an answer: of requests that start, and of sequences with a new token.

Until a matcher (quire/decoding/masks.py) answers for a sequence's last token, the scheduler neither reports it nor
plans the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from quire.decoding.drafts import take_accepted
from quire.decoding.masks import ConstraintSpec, Matcher, num_forceable
from quire.decoding.sequence import Request, RequestStatus, Sequence
from quire.errors import UserError
from quire.kv_cache.manager import KVCacheManager
from quire.step import TokenLogprobs

if TYPE_CHECKING:
    from quire.scheduler.ends import Ends
    from quire.scheduler.in_flight import InFlight, Sampled


Asked: TypeAlias = tuple[Sequence, list[int], list[TokenLogprobs] | None]
"""(sequence, new tokens for its matcher, their logprobs where requested)."""


class Matching:
    def __init__(self) -> None:
        self.starting: list[Request] = []
        """Requests that cannot start before their matchers have answered."""
        self._new: list[Matcher] = []
        self.asked: list[Asked] = []
        self.late: list[Sequence] = []
        """Sequences whose matchers have answered but did not give the mask in time."""

    def begin(self, request: Request) -> None:
        """Make a new request's matchers: one without tokens, and one per sequence that brings tokens."""
        constraint = request.constraint
        if constraint is None:
            return
        params, num_prompt_tokens = request.params, request.num_prompt_tokens
        spec = ConstraintSpec(request.constraint_start, params.ignore_eos, params.allowed_token_ids)
        if any(not sequence.num_output_tokens for sequence in request.sequences):
            request.first_matcher = constraint.matcher(spec, [])
        for sequence in request.live_sequences:
            if sequence.num_output_tokens:
                sequence.matcher = constraint.matcher(spec, sequence.token_ids[num_prompt_tokens:])
        self.starting.append(request)
        self._new += first_matchers(request)

    def take_samples(
        self, sampled: Iterable[Sampled], in_flight: InFlight, ends: Ends, kv: KVCacheManager, may_go_ahead: bool
    ) -> list[Sampled]:
        """Append the samples of constrained sequences and ask their matchers; `Scheduler.settle` continues with the
        answers. Returns the samples of unconstrained sequences."""
        others, discarded, has_drafts = [], in_flight.discarded, bool(in_flight.plan.num_drafts)
        for sample in sampled:
            sequence, new_ids, token_logprobs = sample
            if discarded and sequence in discarded:
                continue
            if sequence.foreseen is not None:
                ends.take_foreseen(sequence, new_ids)
            elif sequence.matcher is None or not new_ids:
                others.append(sample)  # no constraint, the sequence has ended, or the workers have discarded the sample
            else:
                sequence.num_pending_tokens -= 1
                if has_drafts:
                    new_ids = take_accepted(sequence, new_ids, kv)
                    token_logprobs = token_logprobs and token_logprobs[: len(new_ids)]
                else:
                    sequence.token_ids += new_ids
                self._ask(sequence, new_ids, token_logprobs, may_go_ahead=may_go_ahead)
        return others

    def _ask(
        self, sequence: Sequence, token_ids: list[int], logprobs: list[TokenLogprobs] | None, *, may_go_ahead: bool
    ) -> None:
        """Ask a sequence's matcher about its new tokens. may_go_ahead: the next step may compute them before the
        answer."""
        matcher, request = sequence.matcher, sequence.request
        assert matcher is not None
        sequence.awaits_matcher = True
        if matcher.is_slow:
            sequence.draft_token_ids = []
        sequence.goes_ahead = (
            may_go_ahead
            and request.max_pending_tokens > 0
            and not sequence.num_pending_tokens
            and len(sequence.token_ids) < sequence.max_total_tokens
            and matcher.goes_on_behind(token_ids[-1])
            and token_ids[-1] not in request.end_token_ids
        )
        drafts = sequence.draft_token_ids
        matcher.advance(token_ids, num_forceable(sequence), with_mask=sequence.goes_ahead, drafts=drafts)
        self.asked.append((sequence, token_ids, logprobs))

    def note_late(self, sequence: Sequence) -> None:
        """Keep a sequence out of steps until its mask is there; the workers have dropped its last sample for lack of
        one."""
        sequence.goes_ahead = False
        if not sequence.awaits_matcher:
            sequence.awaits_matcher = True
            self.late.append(sequence)

    def take_answered(self) -> list[Asked]:
        """Matchers' questions about new tokens that were answered since the last call, in their order."""
        if self.late:
            late, self.late = self.late, []
            for sequence in late:
                if sequence.matcher is None or sequence.matcher.has_mask:
                    sequence.awaits_matcher = False
                else:
                    self.late.append(sequence)
        answered, asked, self.asked = [], self.asked, []
        for each in asked:
            matcher = each[0].matcher
            if matcher is None or matcher.is_ready:  # None: the sequence has ended meanwhile
                each[0].awaits_matcher = False
                answered.append(each)
            else:
                self.asked.append(each)
        return answered

    def take_refused(self) -> list[tuple[Request, UserError]]:
        """Requests that cannot start under their constraints, with reasons. Startable ones are dropped."""
        refused, left = [], []
        for request in self.starting:
            if request.status is RequestStatus.FINISHED:
                continue
            matchers = first_matchers(request)
            error = next((each.error for each in matchers if each.is_ready and each.error is not None), None)
            if error is not None:
                refused.append((request, error))
            elif not all(each.is_ready for each in matchers):
                left.append(request)
        self.starting = left
        return refused

    def all_go_ahead(self) -> bool:
        """True if the next step computes all tokens that matchers are still judging."""
        return all(sequence.goes_ahead for sequence, _, _ in self.asked)

    def awaited(self) -> list[Matcher]:
        """Matchers that a step may wait for, as most are quick: of sequences whose tokens the next step must not
        compute before the answer, and once those of new requests."""
        new, self._new = self._new, []
        asked = [sequence.matcher for sequence, _, _ in self.asked if not sequence.goes_ahead]
        return new + [matcher for matcher in asked if matcher is not None and not matcher.is_slow]


def first_matchers(request: Request) -> list[Matcher]:
    found = [] if request.first_matcher is None else [request.first_matcher]
    return found + [each.matcher for each in request.live_sequences if each.matcher is not None]


def matcher_of(sequence: Sequence) -> Matcher:
    """Sequence's matcher, made for its first mask."""
    request = sequence.request
    if sequence.matcher is None:
        assert request.first_matcher is not None, "only samples under a constraint have masks"
        sequence.matcher = request.first_matcher if len(request.sequences) == 1 else request.first_matcher.copy()
    if sequence.matcher.is_slow:
        request.max_pending_tokens = 0  # a step that was planned ahead would wait for its mask
    return sequence.matcher
