"""What one message of the core means to the event loop: made on the receiver's thread, handed over on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from quire.engine.messages import CallResult
from quire.engine.output_stream import OutputStream
from quire.errors import QuireError
from quire.outputs import RequestOutput
from quire.stats import EngineStats


class StatsListener(Protocol):
    """Hears of everything that comes out of the engine, on the event loop."""

    def record_outputs(self, outputs: list[RequestOutput]) -> None:
        """Outputs as the engine makes them (cumulative or delta), the last one of each request included."""
        ...

    def record_stats(self, stats: EngineStats) -> None:
        """The snapshot after a step."""
        ...


@dataclass(slots=True)
class Delivery:
    """outputs, failures: to requests. results: to calls. last_outputs: of requests that failed, for listeners alone.
    stats: the snapshot that came along, if any."""

    outputs: list[tuple[OutputStream, RequestOutput]] = field(default_factory=list)
    failures: list[tuple[OutputStream, QuireError]] = field(default_factory=list)
    results: list[tuple[asyncio.Future[CallResult], CallResult]] = field(default_factory=list)
    last_outputs: list[RequestOutput] = field(default_factory=list)
    stats: EngineStats | None = None

    def hand_over(self, listeners: Iterable[StatsListener]) -> None:
        """On the event loop: requests and calls first, so that no failing listener keeps theirs from them."""
        for stream, output in self.outputs:
            stream.put(output)
        for stream, error in self.failures:
            stream.fail(error)
        for future, result in self.results:
            if not future.done():
                future.set_result(result)
        heard = [output for _, output in self.outputs] + self.last_outputs
        for listener in listeners:
            if heard:
                listener.record_outputs(heard)
            if self.stats is not None:
                listener.record_stats(self.stats)
