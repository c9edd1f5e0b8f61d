"""The part of AsyncLLM that knows what there is to do."""

from __future__ import annotations

from quire.engine.async_control import ControlState
from quire.engine.output_stream import OutputStream
from quire.engine.request_part import Backlog, Preparations
from quire.engine.shared_state import EngineState, Loads


class AsyncLoad:
    """Part of AsyncLLM."""

    _control: ControlState | EngineState
    _streams: dict[str, OutputStream]

    def __init__(self) -> None:
        self._num_unfinished = 0
        self._preparations = Preparations()
        self._backlog = Backlog()
        self._loads: Loads | None = None
        """What the processes that share the engine have to do; None where it is ours alone."""

    @property
    def num_unfinished(self) -> int:
        """Requests that were begun and not ended, those still being tokenised included, and those whose consumer has
        yet to take what is there."""
        return self._num_unfinished

    @property
    def num_pending(self) -> int:
        """Requests that run, wait or are being prepared: begun, and not yet reported as finished by the engine. One
        whose consumer is slow to read its end is not among them; parts of a request that wait for their turns are one
        together. This, and the figures below, are of all processes that share the engine."""
        return self._own_num_pending if self._loads is None else self._loads.num_pending

    @property
    def num_running(self) -> int:
        """Requests that the engine computes, as it said last."""
        return self._control.num_running

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of the requests that the engine has and that have got no token yet."""
        return self._backlog.num_tokens if self._loads is None else self._loads.num_tokens

    @property
    def queue_seconds(self) -> float:
        """How long the engine will take for them, by its rate of the last seconds; infinite when it computed none."""
        return self._backlog.seconds if self._loads is None else self._loads.queue_seconds

    @property
    def _own_num_pending(self) -> int:
        return len(self._preparations) + len(self._streams)

    def _publish(self) -> None:
        """Let other processes know what this one has to do. Under the lock: of two threads, the last must be right."""
        if self._loads is not None:
            backlog = self._backlog
            self._loads.publish(self._num_unfinished, self._own_num_pending, backlog.num_tokens, backlog.progress)
