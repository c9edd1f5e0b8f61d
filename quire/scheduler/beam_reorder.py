"""State of beam searches between an update and the next plan."""

from __future__ import annotations

from collections.abc import Mapping

from quire.decoding.beam import BeamSearch, BlockSharing, Child, follow
from quire.decoding.masks import Matcher
from quire.decoding.sequence import Request, RequestStatus, Sequence
from quire.outputs import SequenceUpdate
from quire.request import FinishReason
from quire.scheduler.running import RunningSet
from quire.step import Candidates, SequenceFork


class BeamReorder:
    """Pending changes of beam slots for the next plan: copies of slots to other slots, and replacements of sampled
    tokens."""

    def __init__(self) -> None:
        self._reorders: dict[int, SequenceFork] = {}
        self._token_overrides: dict[int, int] = {}
        self.undecided: list[Request] = []
        """Searches with candidates whose matchers have not answered yet."""

    def follow(self, search: BeamSearch, children: list[Child], kv: BlockSharing) -> list[Sequence]:
        """Make `children` the live beams of a search. Returns the dropped beams whose slots the workers must
        release."""
        followed = follow(search, children, kv)
        dropped = [sequence for sequence in followed.dropped if self.forget(sequence)]
        self._reorders.update({fork.child: fork for fork in followed.forks})
        self._token_overrides.update(followed.token_overrides)
        return dropped

    def advance(
        self, samples: list[Sequence], candidates: Mapping[int, Candidates], running: RunningSet, kv: BlockSharing
    ) -> tuple[list[Request], list[int]]:
        """Distribute a step's candidates (keyed by place in `samples`), and reorder each search that has all of them.
        Returns ended requests and pending forks as `decide`."""
        for position, sequence in enumerate(samples):
            search = sequence.request.beam_search
            if search is None:
                continue
            sequence.num_pending_tokens -= 1
            if sequence.finish_reason is None and search.offer(sequence, candidates[position]):
                self.undecided.append(sequence.request)
        return self.decide(running, kv)

    @property
    def awaited(self) -> list[Matcher]:
        searches = [request.beam_search for request in self.undecided]
        return [matcher for search in searches if search is not None for matcher in search.awaited]

    @property
    def is_empty(self) -> bool:
        return not (self._reorders or self._token_overrides)

    def decide(self, running: RunningSet, kv: BlockSharing) -> tuple[list[Request], list[int]]:
        """Reorder the beam searches whose matchers (grammars) have accepted or refused their candidates. Returns
        (requests whose search has ended, beam slots to release)."""
        ended: list[Request] = []
        released: list[int] = []
        undecided, self.undecided = self.undecided, []
        for request in undecided:
            search = request.beam_search
            assert search is not None
            if request.status is RequestStatus.FINISHED or not search.has_candidates:
                continue  # it has ended, or is computed again
            children = search.expand()
            if children is None:
                self.undecided.append(request)
                continue
            if search.is_done:
                ended.append(request)
                continue
            former, num_reserved = search.running_sequences, len(request.pending_forks)
            released += [dropped.seq_id for dropped in self.follow(search, children, kv)]
            running.replace_beams(search, former, num_reserved)
        return ended, released

    def forget(self, sequence: Sequence) -> bool:
        """Drop the pending changes of a sequence that loses its slot. Returns False if the workers do not know the slot
        yet."""
        self._token_overrides.pop(sequence.seq_id, None)
        return self._reorders.pop(sequence.seq_id, None) is None

    def take(self) -> tuple[list[SequenceFork], list[tuple[int, int]]]:
        """Return and clear, for the next plan, (beam reorders, token overrides as (seq_id, token))."""
        pending = list(self._reorders.values()), list(self._token_overrides.items())
        self._reorders, self._token_overrides = {}, {}
        return pending

    def check(self, running: list[Sequence]) -> None:
        """Assert that pending entries name live sequences, and that no slot is copied before it exists."""
        live = {sequence.seq_id for sequence in running}
        assert self._reorders.keys() | self._token_overrides.keys() <= live, "a reorder names a sequence that ended"
        for fork in self._reorders.values():
            assert fork.parent in live, "a beam reorder copies a slot that was released"
            assert fork.parent not in self._reorders, "a beam reorder copies a slot before it exists"


def hypothesis_updates(request: Request) -> list[SequenceUpdate]:
    """Updates of a finished search: its best `n` hypotheses with all tokens, and an empty update for each missing one
    (all, if time ran out before the first token)."""
    search = request.beam_search
    assert search is not None
    updates: list[SequenceUpdate] = []
    reason = search.hypotheses[0].finish_reason if search.hypotheses else FinishReason.TIMEOUT
    for index in range(request.params.n):
        if index >= len(search.hypotheses):
            updates.append(SequenceUpdate(request.request_id, index, [], finish_reason=reason))
            continue
        hypothesis = search.hypotheses[index]
        update = SequenceUpdate(request.request_id, index, hypothesis.token_ids)
        update.logprobs = hypothesis.logprobs or None
        update.finish_reason, update.stop_reason = hypothesis.finish_reason, hypothesis.stop_reason
        update.ends_in_text = hypothesis.ends_in_text
        update.ranking = hypothesis.cumulative_logprob, hypothesis.score
        updates.append(update)
    return updates
