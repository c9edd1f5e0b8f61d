"""The sequences that have a row, in the order of their requests, and the rows that others have a claim to."""

from __future__ import annotations

import bisect

from quire.decoding.beam import BeamSearch
from quire.decoding.parallel import num_shared_tokens, waiting_siblings
from quire.request import Request, RequestStatus, Sequence


class RunningSet:
    """sequences: those of one request side by side. num_reserved: sequences of running requests that have a claim to a
    row and not the row itself (`Request.pending_forks`)."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.num_reserved = 0

    @property
    def num_rows(self) -> int:
        """Rows that are taken or claimed."""
        return len(self.sequences) + self.num_reserved

    def enter(self, request: Request, sequences: list[Sequence]) -> None:
        """`sequences` get rows; the request's others fork from the first of them at the prompt's end."""
        request.status = RequestStatus.RUNNING
        request.pending_forks = [s for s in request.live_sequences if s not in sequences]
        request.fork_position = num_shared_tokens(request) if waiting_siblings(request) else None
        self.num_reserved += len(request.pending_forks)
        for sequence in sequences:
            bisect.insort(self.sequences, sequence, key=lambda sequence: sequence.request.order_key)

    def insert_forked(self, parent: Sequence, children: list[Sequence]) -> None:
        """`children`, which had a claim, run from now on, right behind their parent."""
        position = self.sequences.index(parent) + 1
        self.sequences[position:position] = children
        self.num_reserved -= len(children)

    def replace_beams(self, search: BeamSearch, former: list[Sequence], num_reserved: int) -> None:
        """The beams of a search have changed. former: those that had rows; num_reserved: how many had a claim."""
        if former:
            position = self.sequences.index(former[0])
            self.sequences[position : position + len(former)] = search.running_sequences
        self.num_reserved += len(search.request.pending_forks) - num_reserved

    def drop_reservation(self, sequence: Sequence) -> None:
        """A sequence that may have a claim ends."""
        if sequence in sequence.request.pending_forks:
            sequence.request.pending_forks.remove(sequence)
            self.num_reserved -= 1

    def drop_reservations(self, request: Request) -> None:
        """None of the request's sequences is to fork any more."""
        self.num_reserved -= len(request.pending_forks)
        request.pending_forks = []

    def leave(self, request: Request) -> None:
        """All of a request's sequences lose their rows and claims. In place: somebody may be walking through them."""
        self.sequences[:] = [sequence for sequence in self.sequences if sequence.request is not request]
        self.drop_reservations(request)

    def drop_finished(self) -> None:
        self.sequences[:] = [sequence for sequence in self.sequences if sequence.finish_reason is None]
