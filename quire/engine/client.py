"""EngineClient: the interface of a front end to an engine core."""

from __future__ import annotations

from typing import Protocol

from quire.engine.messages import ClientMessage, EngineOutputs, EngineReady
from quire.errors import EngineDeadError, QuireError
from quire.logging import get_logger
from quire.utils.failures import explain

logger = get_logger(__name__)

DEFAULT_EXECUTOR = "quire.executors.choice:make_executor"
"""`"module:attribute"` of a callable from EngineConfig to Executor: only the core's process imports torch."""


class EngineClient(Protocol):
    """Connection to one engine core. Any thread may `send`; one thread at a time may `receive`. AsyncLLM, `LLM` and
    fleets use it."""

    @property
    def ready(self) -> EngineReady:
        """Facts that the core found at its start; waits for it. Raises the error of a failed start: ConfigError,
        ModelLoadError, InsufficientMemoryError, or EngineDeadError with the cause."""
        ...

    @property
    def silence(self) -> float:
        """Seconds since the core's process last made progress (quire/engine/heartbeat.py); 0 in this process."""
        ...

    @property
    def stopped(self) -> int | None:
        """Rank whose process is stopped (SIGSTOP), or ENGINE_STOPPED; None: none is."""
        return None

    @property
    def is_restarting(self) -> bool:
        """True while the core is dead and its successor is not ready (quire/engine/fleet.py)."""
        return False

    @property
    def num_restarts(self) -> int:
        return 0

    def send(self, *messages: ClientMessage) -> None:
        """Queue messages in order and return at once. Raises EngineDeadError if the core is gone."""
        ...

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        """Wait for the core's next outputs; None after `timeout` seconds without any. Raises EngineDeadError, with the
        root cause, as soon as the core is gone and on every later call."""
        ...

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop the core, by force after `timeout` seconds; a waiting `receive` fails. Idempotent."""
        ...


def cause_of_death(error: BaseException) -> EngineDeadError:
    """EngineDeadError for all requests, made from the `error` that ended the receiver's thread or the start."""
    if isinstance(error, EngineDeadError):
        return error
    if isinstance(error, QuireError):  # the error of a failed start
        return EngineDeadError(str(error), summary="the engine could not start")
    death = EngineDeadError(f"the front end failed: {explain(error)}", summary="the server's front end failed")
    logger.error("error %s: the engine's front end failed", death.error_id, exc_info=error)
    return death
