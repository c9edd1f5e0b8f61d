"""Member of a fleet (quire/engine/fleet.py): one engine and its successors, with the ledger entries of their
requests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from quire.engine.client import EngineClient
from quire.engine.culprit_search import CulpritSearch
from quire.engine.heartbeat import name_stopped
from quire.engine.messages import AddRequest, ClientMessage, EngineOutputs, EngineReady
from quire.errors import EngineDeadError
from quire.kv_cache.stats import EngineStats, carry_over
from quire.outputs import SequenceUpdate
from quire.request import EngineRequest, ResumePoint
from quire.utils.heartbeat import SILENCE_LIMIT

StartEngine = Callable[[EngineReady | None, EngineStats | None], EngineClient]
"""Starts an engine. Arguments: facts of the fleet's first engine (None: this is the first), and statistics of the
member's earlier engines."""

WATCH_SECONDS = 1.0
"""Seconds between two looks at an engine that may hang."""


@dataclass(slots=True, eq=False)
class Entry:
    """Live request or registered prefix. name: caller's id. arrival: time.monotonic(). generated: token ids by
    sequence; a beam search reports only at its end. ended: indices of finished sequences."""

    request: EngineRequest
    session: int
    name: str
    generated: list[list[int]]
    arrival: float = field(default_factory=time.monotonic)
    ended: set[int] = field(default_factory=set)
    num_prompt_logprobs: int = 0
    member: Member | None = None
    is_sent: bool = False
    """True if `member`'s current engine has the request."""

    @classmethod
    def of(cls, request: EngineRequest, session: int) -> Entry:
        params = request.params
        num_reported = params.n if params.use_beam_search else params.num_sequences
        return cls(request, session, request.request_id.rsplit("#", 1)[0], [[] for _ in range(num_reported)])

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def position(self) -> int:
        """Number of tokens of the longest sequence so far, by which culprits are sought."""
        return max(map(len, self.generated))

    @property
    def is_over(self) -> bool:
        return len(self.ended) == len(self.generated)

    def note(self, update: SequenceUpdate) -> None:
        """Record a request's new tokens and ends that its engine reports, for a resume elsewhere."""
        self.generated[update.index] += update.new_token_ids
        if update.prompt_logprobs is not None:
            self.num_prompt_logprobs = update.prompt_logprobs.start + len(update.prompt_logprobs.entries)
        if update.finish_reason is not None:
            self.ended.add(update.index)

    def resumed(self) -> AddRequest:
        """Request with its resume point, for another engine."""
        generated = self.generated
        if self.request.params.use_beam_search:  # a beam search reports only at its end, so it starts again
            generated = [[] for _ in range(self.request.params.num_sequences)]
        age = time.monotonic() - self.arrival
        point = ResumePoint(generated, sorted(self.ended), self.num_prompt_logprobs, age)
        return AddRequest(msgspec.structs.replace(self.request, resume_point=point))


class Member:
    """One engine of a fleet: its process, requests and open calls. The fleet's lock guards it."""

    def __init__(self, number: int, start: StartEngine, hung_engine_timeout: float) -> None:
        """Engine and its successors. hung_engine_timeout: seconds of silence (quire/engine/heartbeat.py) after which
        the engine is killed; 0: never."""
        self.number, self.name = number, f"replica {number}"
        self.start = start
        self.client: EngineClient | None = None
        self.ready: EngineReady | None = None
        """Facts of its first engine; later ones have as many blocks."""
        self.is_up = False
        """True if `client` accepts messages."""
        self.is_lost = False
        """True if its engines failed too often; its requests have moved."""
        self.is_wanted = True
        """False from a stop to a start."""
        self.is_stopping = False
        """True: its thread ends the engine, even if a start has come since."""
        self.death: EngineDeadError | None = None
        """Last death; None again once the next engine is ready."""
        self.search = CulpritSearch()
        self.entries: dict[str, Entry] = {}
        """Ledger's requests on this member."""
        self.num_fruitless = 0
        """Number of engine deaths since the last token."""
        self.num_restarts = 0
        self.generation = 0
        self.is_ended_with_others = False
        self.stats: EngineStats | None = None
        """Last snapshot of the current engine."""
        self.stats_before: EngineStats | None = None
        """Statistics of the earlier engines."""
        self._hung_engine_timeout = hung_engine_timeout

    @property
    def silence(self) -> float:
        return self.client.silence if self.is_up and self.client is not None else 0.0

    @property
    def stays_up(self) -> bool:
        return self.is_up and not self.is_stopping

    @property
    def takes_new(self) -> bool:
        """True if the engine stays up, is not silent, and searches for no culprit."""
        return self.stays_up and not self.search.is_searching and self.silence < SILENCE_LIMIT

    @property
    def counted(self) -> EngineStats:
        """Statistics of all engines so far. While no engine is up, all its requests count as waiting."""
        now = self.stats or EngineStats(num_waiting=len(self.entries), num_preempted=len(self.entries))
        return carry_over(self.stats_before, now)

    def deliver(self, *messages: ClientMessage) -> None:
        """Send messages to the engine. The thread in `receive` handles its death."""
        assert self.client is not None
        with contextlib.suppress(EngineDeadError):
            self.client.send(*messages)

    def receive(self, deadline: float | None) -> EngineOutputs | None:
        """Next outputs of the engine; None at the deadline (time.monotonic). Called without the lock. Ends a hung or
        unwanted engine, and raises EngineDeadError for it as for a dead one."""
        client = self.client
        assert client is not None
        while True:
            if self.is_stopping:
                client.shutdown()
                raise EngineDeadError("the engine was stopped")
            remaining = WATCH_SECONDS if deadline is None else min(WATCH_SECONDS, deadline - time.monotonic())
            outputs = client.receive(max(0.0, remaining))
            if outputs is not None:
                return outputs
            silence = client.silence
            if 0 < self._hung_engine_timeout <= silence:
                name = name_stopped(client.stopped)
                client.shutdown(0.0)
                message = f"the engine process hung: it gave no sign of life for {silence:.0f} s"
                raise EngineDeadError(f"{message}: {name}" if name else message)
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def note_death(self, death: EngineDeadError) -> None:
        self.is_up, self.is_stopping, self.death = False, False, death
        self.num_fruitless += not self.is_ended_with_others
        if self.stats is not None:
            self.stats_before, self.stats = carry_over(self.stats_before, self.stats), None
