"""Ends of sequences and requests: their blocks, request slots, and the updates of early ends."""

from __future__ import annotations

from collections.abc import Iterable

from quire.decoding.drafts import take_masked_drafts
from quire.decoding.masks import take_forced
from quire.decoding.sequence import Request, RequestStatus, Sequence
from quire.kv_cache.manager import KVCacheManager
from quire.outputs import SequenceUpdate
from quire.request import FinishReason
from quire.scheduler.admission import PrefixRegistration
from quire.scheduler.admitter import Admitter
from quire.scheduler.in_flight import InFlight
from quire.scheduler.matching import Matching
from quire.scheduler.plan_builder import PlanChanges
from quire.scheduler.reporting import (
    early_end,
    ended_search,
    ends_in_text,
    finish_reason,
    live_requests,
    pooled_end,
    report_times,
    report_times_early,
)
from quire.scheduler.running import Collections
from quire.step import StepResult


class Ends:
    def __init__(
        self,
        kv: KVCacheManager,
        changes: PlanChanges,
        collections: Collections,
        registration: PrefixRegistration,
        admitter: Admitter,
    ) -> None:
        self._kv = kv
        self._changes = changes
        self._requests, self._waiting, self._running, self._deadlines, self._stats = collections
        self._registration = registration
        self._admitter = admitter
        self.unmatched: list[tuple[Sequence, str]] = []
        """Sequences that could not continue under their constraints, with reasons, until an update reports them."""

    # -- before their time ------------------------------------------------------------------------------------------

    def end(self, request: Request, ended: list[Sequence], reason: FinishReason) -> None:
        self._admitter.forget_rejection()  # with one running sequence fewer, the waiting request may fit
        lost_leader = bool(request.pending_forks) and any(s.blocks is not None for s in ended)
        for sequence in ended:
            self._running.drop_reservation(sequence)
            self.finish(sequence, reason)
        if lost_leader and request.pending_forks:
            # The siblings were waiting for the leader's prompt: restart the request with another leader.
            self._running.drop_reservations(request)
            request.status = RequestStatus.PREEMPTED
            self._waiting.put_back(request)
        self._running.drop_finished()

    def end_requests(self, requests: Iterable[Request], reason: FinishReason, now: float) -> list[SequenceUpdate]:
        updates = []
        for request in requests:
            updates += early_end(request, reason, now)
            self.end(request, request.live_sequences, reason)
        return updates

    def end_expired(self, expired: list[Request], now: float) -> list[SequenceUpdate]:
        self._stats.timed_out_requests_total += len(expired)
        return self.end_requests(expired, FinishReason.TIMEOUT, now)

    def end_nonfinite(self, in_flight: InFlight, seq_ids: list[int], now: float) -> list[SequenceUpdate]:
        """End the requests of sequences whose logits hold NaN or infinity, and remove their blocks from the prefix
        cache."""
        requests = live_requests(in_flight.sequences + in_flight.samples, seq_ids)
        for request in requests:
            for sequence in request.live_sequences:
                self._kv.evict(sequence.chain)
        return self.end_requests(requests, FinishReason.ERROR, now)

    def end_unmatched(self, sequence: Sequence, reason: str) -> None:
        """End a sequence that cannot continue under its constraint; `report_unmatched` reports it. Of a beam search
        only this beam ends."""
        search = sequence.request.beam_search
        if search is not None:
            search.give_up(sequence, reason)
            return
        self.fail(sequence, reason)

    def fail(self, sequence: Sequence, reason: str) -> None:
        """End a sequence that cannot continue, unless it has ended; `report_unmatched` reports it. For a failed logits
        processor, and for `end_unmatched`."""
        if sequence.finish_reason is None:
            self.unmatched.append((sequence, reason))
            self.end(sequence.request, [sequence], FinishReason.ERROR)

    def take_foreseen(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Check that a sample is the token that the constraint forced, which was reported before; otherwise end the
        sequence. token_ids: result's tokens."""
        assert sequence.foreseen is not None
        expected, sequence.foreseen = sequence.foreseen.token_id, None
        if sequence.finish_reason is None and token_ids != [expected]:
            self.end_unmatched(sequence, f"tokens {token_ids} where the constraint forces {expected}")

    def report_unmatched(self, now: float) -> list[SequenceUpdate]:
        """Updates of the sequences that `end_unmatched` has ended since the last call."""
        ended, self.unmatched = self.unmatched, []
        updates = []
        for sequence, reason in ended:
            update = SequenceUpdate(sequence.request.request_id, sequence.index, [], finish_reason=FinishReason.ERROR)
            update.stop_reason = reason
            report_times(update, sequence.request, now)
            updates.append(update)
        return updates

    # -- in their time ----------------------------------------------------------------------------------------------

    def settle(self, matching: Matching, now: float) -> list[SequenceUpdate]:
        """Continue the beam searches and sequences whose matchers (grammars) have answered: append tokens that the
        grammar forces, end finished sequences. The caller then removes ended sequences from the running ones."""
        updates: list[SequenceUpdate] = []
        if self._changes.beam_reorder.undecided:
            ended, released = self._changes.beam_reorder.decide(self._running, self._kv)
            updates = self._end_searches(ended, released, now)
        for sequence, new_ids, token_logprobs in matching.take_answered():
            matcher, request = sequence.matcher, sequence.request
            if matcher is None:
                continue  # it ended meanwhile
            if matcher.error is not None or matcher.num_accepted < len(new_ids):
                del sequence.token_ids[-len(new_ids) :]
                reason = f"token {new_ids[-1]} does not follow the constraint"
                self.end_unmatched(sequence, reason if matcher.error is None else matcher.error.message)
                continue
            num_sampled = len(sequence.token_ids)
            if matcher.forced:
                new_ids = new_ids + take_forced(sequence)
            if sequence.draft_token_ids:
                take_masked_drafts(sequence)
            update = SequenceUpdate(request.request_id, sequence.index, new_ids)
            if token_logprobs:
                update.logprobs = token_logprobs
            update.drafts, sequence.draft_step = sequence.draft_step, b""
            is_full = len(sequence.token_ids) >= sequence.max_total_tokens
            if is_full or new_ids[-1] in request.end_token_ids or matcher.is_finished:
                self.finish_in_time(sequence, update, now)
            elif num_sampled <= sequence.report_times_until:
                report_times_early(update, sequence, num_sampled, now)
            updates.append(update)
        self._stats.generation_tokens_total += sum([len(update.new_token_ids) for update in updates])
        return updates

    def finish_in_time(self, sequence: Sequence, update: SequenceUpdate, now: float) -> None:
        """Finish a sequence whose last token ends it, and record the reason and the request's times in its update."""
        update.ends_in_text = ends_in_text(sequence, update.new_token_ids[-1])
        update.finish_reason, update.stop_reason = reason = finish_reason(sequence, update.new_token_ids[-1])
        self.finish(sequence, reason[0])
        report_times(update, sequence.request, now)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence and free its blocks; a request ends with its last sequence."""
        sequence.finish_reason = reason
        sequence.matcher = None
        request = sequence.request
        if sequence.blocks is not None:
            self._changes.release_slot(sequence)
            if request.register_prefix and reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._kv.register_prefix(request.request_id, sequence.blocks, request.prompt_token_ids)
            elif reason in (FinishReason.STOP, FinishReason.LENGTH) and request.beam_search is None:
                # The last sampled or forced token is not computed. While a forced token is being sampled, its step's
                # results may still be non-finite.
                num_computed = sequence.num_computed_tokens - (sequence.foreseen is not None)
                num_stored = min(num_computed, len(sequence.token_ids) - (not request.pooling))
                self._kv.finish(request.request_id, sequence.seq_id, sequence.blocks, num_stored)
            else:
                self._kv.free(sequence.blocks)
            sequence.blocks = None
        elif sequence.swapped is not None:
            self._kv.free(sequence.swapped)
            sequence.swapped = None
        if not any(other.finish_reason is None for other in request.sequences):
            request.status = RequestStatus.FINISHED
            # Request and sequences refer to one another, so garbage collection takes a while.
            request.constraint = request.first_matcher = None
            request.images = []  # some megabytes each
            if request.beam_search is not None:
                request.beam_search.forget_candidates()
            self._waiting.remove(request)
            self._deadlines.discard(request)
            if request.register_prefix:
                self._registration.release(request)
            self._admitter.forget(request)
            del self._requests[request.request_id]
            self._stats.finished_requests_total += 1

    def end_pooled(self, samples: list[Sequence], vectors: dict[int, list[float]], now: float) -> list[SequenceUpdate]:
        """End the pooled requests whose vectors have come with a step's result (index of a sample -> vector)."""
        found = [(samples[index], vector) for index, vector in vectors.items()]
        ended = [(sequence, vector) for sequence, vector in found if sequence.finish_reason is None]
        for sequence, _ in ended:
            self.finish(sequence, FinishReason.STOP)
        return [pooled_end(sequence, vector, now) for sequence, vector in ended]

    def update_beams(self, samples: list[Sequence], result: StepResult, now: float) -> list[SequenceUpdate]:
        """Process the candidates of all beams among the samples; returns the updates of ended searches."""
        ended, released = self._changes.beam_reorder.advance(samples, result.candidates, self._running, self._kv)
        return self._end_searches(ended, released, now)

    def _end_searches(self, ended: list[Request], released: list[int], now: float) -> list[SequenceUpdate]:
        self._changes.released += released
        updates = []
        for request in ended:
            self._running.drop_reservations(request)
            found = ended_search(request, now)
            for sequence in request.sequences:
                self.finish(sequence, found[0].finish_reason or FinishReason.STOP)
            updates += found
        return updates
