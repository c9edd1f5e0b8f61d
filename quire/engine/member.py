"""A member of a fleet (quire/engine/fleet.py): a place for one engine, and for those that follow it when it dies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from quire.engine.client import EngineClient
from quire.engine.culprit_search import CulpritSearch
from quire.engine.messages import ClientMessage, EngineOutputs, EngineReady
from quire.errors import EngineDeadError
from quire.kv_cache.stats import EngineStats, carry_over
from quire.utils.heartbeat import SILENCE_LIMIT

StartEngine = Callable[[EngineReady | None, EngineStats | None], EngineClient]
"""Starts an engine. Its arguments: what the first engine of the fleet found at its start (None: this is the first), and
what the engines of this place had counted."""

WATCH_SECONDS = 1.0
"""Seconds between two looks whether an engine hangs."""


class Member:
    """The fields are the fleet's, and guarded by its lock."""

    def __init__(self, number: int, start: StartEngine, hung_engine_timeout: float) -> None:
        """hung_engine_timeout: seconds of silence (quire/engine/heartbeat.py) after which the engine is ended as one
        that hangs; 0: never. A long step is no silence, so no prompt is too long for it."""
        self.number = number
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
        self.asked: list[tuple[int, int]] = []
        """Sessions and numbers of the calls that asked for that, unanswered."""
        self.death: EngineDeadError | None = None
        """The last one; None while no engine has died, and once the next one is ready."""
        self.search = CulpritSearch()
        self.num_live = 0
        """Requests of the ledger that are here."""
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
        now = self.stats or EngineStats(num_waiting=self.num_live, num_preempted=self.num_live)
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
