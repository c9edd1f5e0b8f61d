"""Streams of the host that log which stream waits for which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from quire.worker.platform.streams import HostStreams, PassedEvent


class NamedStreams(HostStreams):
    """The streams by their names, which `_inside` takes."""

    def computing(self) -> AbstractContextManager[object]:
        return self._inside("compute")

    def transferring(self) -> AbstractContextManager[object]:
        return self._inside("transfer")

    def copying_in(self) -> AbstractContextManager[object]:
        return self._inside("copy in")

    def loading(self) -> AbstractContextManager[object]:
        return self._inside("load")

    def _inside(self, name: str) -> AbstractContextManager[object]:
        raise NotImplementedError


class LoggingStreams(NamedStreams):
    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "compute"
        self._num_events = 0

    def record(self) -> PassedEvent:
        self._num_events += 1
        self.log.append(f"record {self._num_events} on {self.current}")
        return LoggedEvent(self, self._num_events)

    @contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before


class LoggedEvent(PassedEvent):
    def __init__(self, streams: LoggingStreams, number: int) -> None:
        self._streams = streams
        self._number = number

    def wait(self) -> None:
        self._streams.log.append(f"{self._streams.current} waits for {self._number}")

    def synchronize(self) -> None:
        self._streams.log.append(f"host waits for {self._number}")
