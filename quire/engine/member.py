"""A member of a fleet (quire/engine/fleet.py): a place for one engine, and for those that follow it when it dies, with
the ledger's entries of the requests that are there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from quire.engine.client import EngineClient
from quire.engine.culprit_search import CulpritSearch
from quire.engine.messages import AddRequest, ClientMessage, EngineOutputs, EngineReady
from quire.errors import EngineDeadError
from quire.kv_cache.stats import EngineStats, carry_over
from quire.outputs import SequenceUpdate
from quire.request import EngineRequest, ResumePoint
from quire.utils.heartbeat import SILENCE_LIMIT

StartEngine = Callable[[EngineReady | None, EngineStats | None], EngineClient]
"""Starts an engine. Its arguments: what the first engine of the fleet found at its start (None: this is the first), and
what the engines of this place had counted."""

WATCH_SECONDS = 1.0
"""Seconds between two looks whether an engine hangs."""


@dataclass(slots=True, eq=False)
class Entry:
    """A request that has not ended, or a registered prefix. name: the caller's, without the mark of its session.
    arrival: of time.monotonic. generated, ended: tokens, and the sequences that are over; a beam search reports at its
    end alone."""

    request: EngineRequest
    session: int
    name: str
    generated: list[list[int]]
    arrival: float = field(default_factory=time.monotonic)
    ended: set[int] = field(default_factory=set)
    num_prompt_logprobs: int = 0
    member: Member | None = None
    is_sent: bool = False
    """Whether the engine that `member` has now has got it."""

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
        """Tokens of the longest sequence."""
        return max(map(len, self.generated))

    @property
    def is_over(self) -> bool:
        return len(self.ended) == len(self.generated)

    def note(self, update: SequenceUpdate) -> None:
        """Take what an engine reports."""
        self.generated[update.index] += update.new_token_ids
        if update.prompt_logprobs is not None:
            self.num_prompt_logprobs = update.prompt_logprobs.start + len(update.prompt_logprobs.entries)
        if update.finish_reason is not None:
            self.ended.add(update.index)

    def resumed(self) -> AddRequest:
        """The request as another engine gets it."""
        generated = self.generated
        if self.request.params.use_beam_search:  # hypotheses come at the end, all at once: it begins anew
            generated = [[] for _ in range(self.request.params.num_sequences)]
        age = time.monotonic() - self.arrival
        point = ResumePoint(generated, sorted(self.ended), self.num_prompt_logprobs, age)
        return AddRequest(msgspec.structs.replace(self.request, resume_point=point))


class Member:
    """The fields are the fleet's, and guarded by its lock."""

    def __init__(self, number: int, start: StartEngine, hung_engine_timeout: float) -> None:
        """hung_engine_timeout: seconds of silence (quire/engine/heartbeat.py) after which the engine is ended as one
        that hangs; 0: never. A long step is no silence, so no prompt is too long for it."""
        self.number, self.name = number, f"replica {number}"
        self.start = start
        self.client: EngineClient | None = None
        self.ready: EngineReady | None = None
        """Facts of its first engine: those after it have the same number of blocks. None before."""
        self.is_up = False
        """Whether `client` takes messages."""
        self.is_lost = False
        """Whether its engines failed so often that its requests went to the other members."""
        self.is_wanted = True
        """Whether it is to have an engine. Set to False, its thread ends the one that it has."""
        self.death: EngineDeadError | None = None
        """The last one; None while no engine has died, and once the next one is ready."""
        self.search = CulpritSearch()
        self.entries: dict[str, Entry] = {}
        """The requests of the ledger that are here."""
        self.num_fruitless = 0
        """Deaths since the last token."""
        self.num_restarts = 0
        self.stats: EngineStats | None = None
        """The last snapshot of the engine that lives now."""
        self.stats_before: EngineStats | None = None
        """What the engines that have ended had counted."""
        self._hung_engine_timeout = hung_engine_timeout

    @property
    def silence(self) -> float:
        """Seconds without a sign of life of its engine; 0 while there is none."""
        return self.client.silence if self.is_up and self.client is not None else 0.0

    @property
    def takes_new(self) -> bool:
        """Whether a new request would begin here at once."""
        return self.is_up and self.is_wanted and not self.search.is_searching and self.silence < SILENCE_LIMIT

    @property
    def counted(self) -> EngineStats:
        """What all engines of this place have counted, and the state of the one that is up. Without one, the requests
        that are here wait to be resumed."""
        now = self.stats or EngineStats(num_waiting=len(self.entries), num_preempted=len(self.entries))
        return carry_over(self.stats_before, now)

    def deliver(self, *messages: ClientMessage) -> None:
        """Send to its engine. A death is noticed by the thread in `receive`, and the next engine gets what lives."""
        assert self.client is not None
        with contextlib.suppress(EngineDeadError):
            self.client.send(*messages)

    def receive(self, deadline: float | None) -> EngineOutputs | None:
        """What the engine sends next; None at the deadline (of time.monotonic). Without the lock. Ends an engine that
        hangs or is not wanted, and raises EngineDeadError for it as for one that has died."""
        client = self.client
        assert client is not None
        while True:
            if not self.is_wanted:
                client.shutdown()
                raise EngineDeadError("the engine was stopped")
            remaining = WATCH_SECONDS if deadline is None else min(WATCH_SECONDS, deadline - time.monotonic())
            outputs = client.receive(max(0.0, remaining))
            if outputs is not None:
                return outputs
            silence = client.silence
            if 0 < self._hung_engine_timeout <= silence:
                client.shutdown(0.0)
                raise EngineDeadError(f"the engine process hung: it gave no sign of life for {silence:.0f} s")
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def note_death(self, death: EngineDeadError) -> None:
        self.is_up, self.death = False, death
        self.num_fruitless += 1
        if self.stats is not None:
            self.stats_before, self.stats = carry_over(self.stats_before, self.stats), None
