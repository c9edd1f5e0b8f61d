"""An EngineClient whose steps a test lets through one by one."""

from __future__ import annotations

import threading

from quire.config.options import EngineOptions
from quire.engine.messages import EngineOutputs
from tests.fakes.mortal import FAKE, MortalClient


class GatedClient(MortalClient):
    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options, FAKE, self._is_due, loses=False)
        self.is_killed = False
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self._num_left = 0

    def let(self, num_steps: int) -> None:
        """Let that many calls of `receive` through."""
        self._num_left += num_steps
        self._permits.release(num_steps)

    @property
    def is_waiting(self) -> bool:
        """Whether it has made all steps that it may."""
        return self._num_left == 0

    def open(self) -> None:
        self._is_open = True
        self._permits.release()

    def kill(self) -> None:
        """End it before its next step."""
        self.is_killed = True
        self._permits.release()

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        if not self._is_open and not self._permits.acquire(timeout=timeout):
            return None
        try:
            return super().receive(timeout if self._is_open else 0)
        finally:
            self._num_left -= 1

    def _is_due(self, _request_ids: set[str]) -> bool:
        return self.is_killed
