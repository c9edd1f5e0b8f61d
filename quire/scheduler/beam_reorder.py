"""Beams between two plans: what an update decided about rows, kept until the next plan tells the workers."""

from __future__ import annotations

from quire.decoding.beam import BeamSearch, BlockSharing, Child, follow
from quire.outputs import SequenceUpdate
from quire.request import FinishReason, Request, Sequence
from quire.step import SequenceFork


class BeamReorder:
    """Rows that begin as copies of others, and tokens that replace what the workers sampled, as of the next plan."""

    def __init__(self) -> None:
        self._reorders: dict[int, SequenceFork] = {}
        self._token_overrides: dict[int, int] = {}

    def follow(self, search: BeamSearch, children: list[Child], kv: BlockSharing) -> list[Sequence]:
        """Make `children` the live beams of a search. Returns the dead ones whose rows the workers drop first."""
        followed = follow(search, children, kv)
        dropped = [sequence for sequence in followed.dropped if self.forget(sequence)]
        self._reorders.update({fork.child: fork for fork in followed.forks})
        self._token_overrides.update(followed.token_overrides)
        return dropped

    def forget(self, sequence: Sequence) -> bool:
        """A sequence loses its row. Returns whether the workers know that row: its branch may not have been planned."""
        self._token_overrides.pop(sequence.seq_id, None)
        return self._reorders.pop(sequence.seq_id, None) is None

    def take(self) -> tuple[list[SequenceFork], list[tuple[int, int]]]:
        """(branches, chosen tokens) for a plan, which are then told."""
        told = list(self._reorders.values()), list(self._token_overrides.items())
        self._reorders, self._token_overrides = {}, {}
        return told

    def check(self, running: list[Sequence]) -> None:
        """Assert that only live rows are spoken of, and no row is copied that does not exist yet."""
        live = {sequence.seq_id for sequence in running}
        assert self._reorders.keys() | self._token_overrides.keys() <= live, "a row is to branch that is gone"
        for fork in self._reorders.values():
            assert fork.parent in live, "a row is to be copied that is gone"
            assert fork.parent not in self._reorders, "a row is to be copied before it exists"


def hypothesis_updates(request: Request) -> list[SequenceUpdate]:
    """What comes of a search that is done: its best `n` hypotheses, whole; an empty end for each that is missing (for
    all of them, if it ran out of time before the first token)."""
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
        update.ranking = hypothesis.cumulative_logprob, hypothesis.score
        updates.append(update)
    return updates
