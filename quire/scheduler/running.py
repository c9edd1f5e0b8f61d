"""Running sequences in their requests' order, and reserved request slots of siblings."""

from __future__ import annotations

import bisect
import itertools
from typing import NamedTuple

from quire.decoding.beam import BeamSearch
from quire.decoding.parallel import num_shared_tokens, waiting_siblings
from quire.decoding.sequence import Request, RequestStatus, Sequence
from quire.kv_cache.stats import EngineStats
from quire.scheduler.queue import Deadlines, RequestQueue


class RunningSet:
    """Sequences with a request slot. sequences: one request's are adjacent. num_reserved: reservations, one per
    sequence of a running request that will fork later (`Request.pending_forks`). version: grows with every possible
    change of the running requests."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.num_reserved = 0
        self.version = 0

    @property
    def num_slots(self) -> int:
        return len(self.sequences) + self.num_reserved

    @property
    def num_in_background(self) -> int:
        """Number of background requests, which come last."""
        last = itertools.takewhile(lambda request: request.is_background, (s.request for s in reversed(self.sequences)))
        return len(dict.fromkeys(last))

    def enter(self, request: Request, sequences: list[Sequence]) -> None:
        """Run `sequences` of a request; the others fork from the first of them at the prompt's end. As it starts or
        resumes."""
        self.version += 1
        request.status = RequestStatus.RUNNING
        request.pending_forks = [s for s in request.live_sequences if s not in sequences]
        request.fork_position = num_shared_tokens(request) if waiting_siblings(request) else None
        self.num_reserved += len(request.pending_forks)
        for sequence in sequences:
            bisect.insort(self.sequences, sequence, key=lambda sequence: sequence.request.order_key)

    def insert_forked(self, parent: Sequence, children: list[Sequence]) -> None:
        """Run `children`, whose slots were reserved, right after their parent."""
        position = self.sequences.index(parent) + 1
        self.sequences[position:position] = children
        self.num_reserved -= len(children)

    def replace_beams(self, search: BeamSearch, former: list[Sequence], num_reserved: int) -> None:
        """Replace the beams of a search. former: beams that ran. num_reserved: slots reserved for its further
        beams."""
        if former:
            position = self.sequences.index(former[0])
            self.sequences[position : position + len(former)] = search.running_sequences
        self.num_reserved += len(search.request.pending_forks) - num_reserved

    def drop_reservation(self, sequence: Sequence) -> None:
        if sequence in sequence.request.pending_forks:
            sequence.request.pending_forks.remove(sequence)
            self.num_reserved -= 1

    def drop_reservations(self, request: Request) -> None:
        self.num_reserved -= len(request.pending_forks)
        request.pending_forks = []

    def leave(self, request: Request) -> None:
        """Remove a preempted or ended request's sequences and reserved slots."""
        self.version += 1
        self.sequences[:] = [sequence for sequence in self.sequences if sequence.request is not request]
        self.drop_reservations(request)

    def drop_finished(self) -> None:
        self.version += 1
        self.sequences[:] = [sequence for sequence in self.sequences if sequence.finish_reason is None]


class Collections(NamedTuple):
    """Scheduler's requests and counters. requests: all requests by id; each waits or runs."""

    requests: dict[str, Request]
    waiting: RequestQueue
    running: RunningSet
    deadlines: Deadlines
    stats: EngineStats
