"""The context that all routes share: the engine, the settings, and the admission of requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.errors import UnknownModelError, UserError, nearest_name
from quire.server.errors import overloaded, unavailable
from quire.server.keys import Client
from quire.server.settings import ServerSettings
from quire.tokenization.tokenizer import Tokenizer
from quire.version import __version__

if TYPE_CHECKING:
    from quire.engine.async_engine import AsyncLLM
    from quire.metrics.prometheus import EngineMetrics

RETRY_AFTER_SECONDS = 1
SYSTEM_FINGERPRINT = f"quire-{__version__}"


@dataclass(slots=True)
class ServerContext:
    """One server. `created`: seconds since 1970 at its start."""

    engine: AsyncLLM
    tokenizer: Tokenizer
    settings: ServerSettings
    metrics: EngineMetrics
    model_names: tuple[str, ...]
    max_body_bytes: int
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    on_close: list[Callable[[], None]] = field(default_factory=list)
    """Ends what would hold connections open for ever."""

    def close(self) -> None:
        """Called once the last answer is given, before the HTTP server waits for its connections to end."""
        for end in self.on_close:
            end()

    def served_name(self, model: str | None) -> str:
        """The name to answer with. None asks for the default; raises UnknownModelError for any other model."""
        if model is None:
            return self.model_names[0]
        if model not in self.model_names:
            nearest = nearest_name(model, self.model_names)
            served = ", ".join(self.model_names)
            raise UnknownModelError(f"the model {model!r} does not exist{nearest} (served: {served})", param="model")
        return model

    def check_priority(self, priority: int, client: Client) -> None:
        """Raise UserError for a priority that `client` may not send. Whether the engine takes any is its own to say."""
        low, high = client.priorities
        if self.engine.takes_priorities and not low <= priority <= high:
            raise UserError(
                f"priority must be between {low} and {high} on this server ({client.option}), not {priority}",
                param="priority",
            )

    def check_alive(self) -> None:
        """Raise a 503 error when the engine is dead or does not answer, or the server is on its way out."""
        self.engine.check_health()
        if self.draining:
            raise unavailable("the server is shutting down")

    def admit(self) -> None:
        """Raise unless a new generating request may come in: 503 as `check_alive` and while the engine sleeps, 429 when
        too many wait already.

        Requests that the engine has not reported on yet count as waiting; answers that their clients have not read to
        the end do not: the engine is done with them.
        """
        self.check_alive()
        self.engine.check_awake()
        limit = self.settings.max_num_queued
        if limit is None:
            return
        num_waiting = self.engine.num_pending - self.metrics.num_running
        if num_waiting >= limit:
            raise overloaded(
                f"the server is overloaded: {num_waiting} requests wait (limit {limit})", RETRY_AFTER_SECONDS
            )


def new_id(prefix: str, request_id: str | None) -> str:
    """A response's id: the client's own request id, or a random one, behind OpenAI's prefix."""
    return f"{prefix}-{request_id or uuid.uuid4().hex}"
