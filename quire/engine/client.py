"""EngineClient: how a front end talks to an engine core, wherever it runs."""

from __future__ import annotations

from typing import Protocol

from quire.engine.messages import ClientMessage, EngineOutputs, EngineReady
from quire.errors import EngineDeadError, QuireError
from quire.logging import get_logger
from quire.utils.failures import explain

logger = get_logger(__name__)

DEFAULT_EXECUTOR = "quire.executors.choice:make_executor"
"""`"module:attribute"` of a callable that makes an executor from an EngineConfig. A name, so that only the process
where the core runs imports torch."""


class EngineClient(Protocol):
    """One engine core. Any thread may `send`; one thread at a time may `receive`. A client that inherits from this is
    never started again."""

    @property
    def ready(self) -> EngineReady:
        """Facts found at the start. Waits for the end of the start-up, if the core runs elsewhere.

        Raises what the start-up failed with: ConfigError, ModelLoadError, InsufficientMemoryError, or
        EngineDeadError with the cause.
        """
        ...

    @property
    def silence(self) -> float:
        """Seconds for which the core's process has given no sign of life (quire/engine/heartbeat.py); 0 for a core in
        this process. Counted while a thread waits in `receive`."""
        ...

    @property
    def is_restarting(self) -> bool:
        """Whether the core has died and another one is not ready yet (quire/engine/fleet.py)."""
        return False

    @property
    def num_restarts(self) -> int:
        """How often the core was started again."""
        return 0

    def send(self, *messages: ClientMessage) -> None:
        """Queue messages, in their order, and return at once. Raises EngineDeadError when the core is gone."""
        ...

    def receive(self, timeout: float | None = None) -> EngineOutputs | None:
        """Wait for what the core has to tell; None after `timeout` seconds without anything.

        Raises EngineDeadError, with the root cause, as soon as the core is gone, and ever after.
        """
        ...

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop the core, by force after `timeout` seconds. A waiting `receive` fails. Idempotent."""
        ...


def cause_of_death(error: BaseException) -> EngineDeadError:
    """What the end of the receiver's thread means to all requests."""
    if isinstance(error, EngineDeadError):
        return error
    if isinstance(error, QuireError):  # what a start failed with
        return EngineDeadError(str(error), summary="the engine could not start")
    death = EngineDeadError(f"the front end failed: {explain(error)}", summary="the server's front end failed")
    logger.error("error %s: the engine's front end failed", death.error_id, exc_info=error)
    return death
