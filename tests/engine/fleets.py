"""Fleets whose engines make the steps that a test lets through."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from quire.config.options import EngineOptions
from quire.engine.fleet import Fleet
from quire.engine.messages import EngineReady
from quire.kv_cache.stats import EngineStats
from quire.outputs import SequenceUpdate
from quire.parallel.replica_memory import CommonMemory
from tests.engine.requests import Heard
from tests.fakes.gated import GatedClient

PATIENCE = 120.0
"""Seconds, against a test that hangs."""


def started(fleet: Fleet) -> Fleet:
    """When all members take requests."""
    _ = fleet.ready
    return fleet


class Gated:
    """A fleet whose engines, also those that follow one that was killed, make the steps that a test lets through."""

    def __init__(
        self,
        options: EngineOptions,
        count: int = 2,
        router: str = "round-robin",
        common: CommonMemory | None = None,
    ) -> None:
        self.engines: list[list[GatedClient]] = [[] for _ in range(count)]

        def starter(number: int) -> Callable[..., GatedClient]:
            def start(_ready: EngineReady | None, _stats: EngineStats | None) -> GatedClient:
                self.engines[number].append(GatedClient(options))
                return self.engines[number][-1]

            return start

        starts = [starter(number) for number in range(count)]
        self.fleet = started(Fleet(starts, router=router, hung_engine_timeout=1000.0, common=common))

    def __getitem__(self, number: int) -> GatedClient:
        """The engine that the member has now."""
        return self.engines[number][-1]

    def step(self, number: int, heard: Heard, num_steps: int = 1) -> None:
        """Let an engine make steps, each with something to tell, and hear it."""
        for _ in range(num_steps):
            self[number].let(1)
            outputs = self.fleet.receive(PATIENCE)
            assert outputs is not None
            note(outputs.updates, heard)

    def open(self) -> None:
        for engines in self.engines:
            engines[-1].open()


def note(updates: Sequence[SequenceUpdate], heard: Heard) -> None:
    for update in updates:
        heard.setdefault((update.request_id, update.index), []).append(update)


def owners(fleet: Fleet, *request_ids: str) -> list[int]:
    members = [fleet._entries[request_id].member for request_id in request_ids]
    return [member.number for member in members if member is not None]


def wait_for(is_so: Callable[[], bool]) -> None:
    event = threading.Event()
    for _ in range(int(PATIENCE / 0.002)):
        if is_so():
            return
        event.wait(0.002)
    raise AssertionError("it does not come to be so")
