"""The sequences that have a row, in the order of their requests, and the rows that others have a claim to."""

from __future__ import annotations

import bisect

from quire.decoding.beam import BeamSearch
from quire.decoding.parallel import num_shared_tokens, waiting_siblings
from quire.request import Request, RequestStatus, Sequence


class RunningSet:
    """sequences: those of one request side by side. num_claimed: sequences of running requests that have a claim to a
    row and not the row itself (`Request.unforked`)."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.num_claimed = 0

    @property
    def num_rows(self) -> int:
        """Rows that are taken or claimed."""
        return len(self.sequences) + self.num_claimed

    def enter(self, request: Request, sequences: list[Sequence]) -> None:
        """`sequences` get rows; the request's others fork from the first of them at the prompt's end."""
        request.status = RequestStatus.RUNNING
        request.unforked = [s for s in request.live_sequences if s not in sequences]
        request.fork_position = num_shared_tokens(request) if waiting_siblings(request) else None
        self.num_claimed += len(request.unforked)
        for sequence in sequences:
            bisect.insort(self.sequences, sequence, key=lambda sequence: sequence.request.order_key)

    def insert_forked(self, parent: Sequence, children: list[Sequence]) -> None:
        """`children`, which had a claim, run from now on, right behind their parent."""
        position = self.sequences.index(parent) + 1
        self.sequences[position:position] = children
        self.num_claimed -= len(children)

    def replace_beams(self, search: BeamSearch, former: list[Sequence], num_claimed: int) -> None:
        """The beams of a search have changed. former: those that had rows; num_claimed: how many had a claim."""
        if former:
            position = self.sequences.index(former[0])
            self.sequences[position : position + len(former)] = search.running_sequences
        self.num_claimed += len(search.request.unforked) - num_claimed

    def forget_claim(self, sequence: Sequence) -> None:
        """A sequence that may have a claim ends."""
        if sequence in sequence.request.unforked:
            sequence.request.unforked.remove(sequence)
            self.num_claimed -= 1

    def forget_claims(self, request: Request) -> None:
        """None of the request's sequences is to fork any more."""
        self.num_claimed -= len(request.unforked)
        request.unforked = []

    def leave(self, request: Request) -> None:
        """All of a request's sequences lose their rows and claims. In place: somebody may be walking through them."""
        self.sequences[:] = [sequence for sequence in self.sequences if sequence.request is not request]
        self.forget_claims(request)

    def drop_finished(self) -> None:
        self.sequences[:] = [sequence for sequence in self.sequences if sequence.finish_reason is None]
