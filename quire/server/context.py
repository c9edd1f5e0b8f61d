"""The context that all routes share: the engine, the settings, and the admission of requests."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from quire.errors import UnknownModelError, UserError, nearest_name
from quire.logging import get_logger
from quire.server.answer_format import AnswerFormats
from quire.server.errors import overloaded, unavailable
from quire.server.keys import Client
from quire.server.limits import CLIENT
from quire.server.response_store import Responses
from quire.server.running import RunningAnswers
from quire.server.settings import OLLAMA, OLLAMA_TAG, ServerSettings
from quire.tokenization.tokenizer import Tokenizer
from quire.version import __version__

if TYPE_CHECKING:
    from quire.engine.async_engine import AsyncLLM
    from quire.metrics.prometheus import EngineMetrics
    from quire.server.adapters import ServedAdapters

LEAST_RETRY_SECONDS, MOST_RETRY_SECONDS = 1, 60
"""Bounds of Retry-After."""
MAX_LOGGED_FIELDS = 256
SYSTEM_FINGERPRINT = f"quire-{__version__}"


logger = get_logger(__name__)


@dataclass(slots=True)
class ServerContext:
    """One server. `created`: seconds since 1970 at its start."""

    engine: AsyncLLM
    tokenizer: Tokenizer
    settings: ServerSettings
    metrics: EngineMetrics
    model_names: tuple[str, ...]
    max_body_bytes: int
    formats: AnswerFormats
    responses: Responses
    adapters: ServedAdapters
    running: RunningAnswers = field(default_factory=RunningAnswers)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    start_seconds: Mapping[str, float] = field(default_factory=dict)
    """Phase of the start -> seconds."""
    on_close: list[Callable[[], None]] = field(default_factory=list)
    """Ends what would hold connections open for ever."""
    on_exit: list[Callable[[], object]] = field(default_factory=list)
    """Writes out what is still to be written. May wait for others."""
    logged_fields: set[str] = field(default_factory=set)
    """Unknown fields of requests that the log has."""

    def exit(self) -> None:
        """Called last, when nothing is served any more."""
        for end in self.on_exit:
            end()

    def close(self) -> None:
        """Called once the last answer is given, before the HTTP server waits for its connections to end."""
        for end in self.on_close:
            end()

    def log_unknown_fields(self, path: str, names: list[str]) -> None:
        """Log each field of requests that has no effect once, MAX_LOGGED_FIELDS of them at most."""
        for name in names:
            if name not in self.logged_fields and len(self.logged_fields) < MAX_LOGGED_FIELDS:
                self.logged_fields.add(name)
                logger.warning("%s: the field %.100r of a request has no effect (logged once)", path, name)

    def served_name(self, model: str | None) -> str:
        """The name to answer with. None asks for the default; raises UnknownModelError for any other model. Clients of
        Ollama's API call `m` also `m:latest`, on all routes."""
        name = self._known_name(model)
        if name is None or not may_use(name):
            names = self.usable(self.names)
            asked = self.model_names[0] if model is None else model
            nearest, served = nearest_name(asked, names), ", ".join(names) or "none with this key"
            raise UnknownModelError(f"the model {asked!r} does not exist{nearest} (served: {served})", param="model")
        return name

    @property
    def names(self) -> list[str]:
        """Of the model and of the adapters that are loaded."""
        return [*self.model_names, *self.adapters.names]

    def usable(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that the client of this request may use."""
        return [name for name in names if may_use(name)]

    async def meet(self, model: str) -> None:
        """As ServedAdapters.meet, for a name that the client of this request may use."""
        if may_use(model):
            await self.adapters.meet(model)

    def _known_name(self, model: str | None) -> str | None:
        if model is None:
            return self.model_names[0]
        if model in self.model_names or self.adapters.find(model) is not None:
            return model
        others = (model.removesuffix(OLLAMA_TAG), model + OLLAMA_TAG) if OLLAMA in self.settings.doors else ()
        return next((name for name in others if name in self.model_names), None)

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

    def check_ready(self) -> None:
        """Raise a 503 error unless a request would be answered now: as `check_alive`, while the engine sleeps or is
        paused, and while another one starts after one that has died."""
        self.check_alive()
        if self.engine.is_restarting:
            raise unavailable("the engine has died, and another one is starting")
        self.engine.check_awake()
        if self.engine.pauses:
            raise unavailable("the engine is paused")

    def admit(self) -> None:
        """Raise unless a new generating request may come in: 503 as `check_alive`, while the engine sleeps and under a
        pause that keeps no requests, 429 when too many wait already.

        Requests that the engine has not reported on yet count as waiting; answers that their clients have not read to
        the end do not: the engine is done with them.
        """
        self.check_alive()
        self.engine.check_awake()
        if self.engine.refuses_new:
            raise unavailable("the engine is paused, and takes requests again after POST /resume")
        limit = self.settings.max_num_queued
        if limit is not None and (number := self.engine.num_pending - self.engine.num_running) >= limit:
            self._refuse("max_num_queued_reqs", f"{number} requests wait (limit {limit})")
        limit = self.settings.max_num_queued_tokens
        if limit is not None and (number := self.engine.num_queued_tokens) >= limit:
            self._refuse("max_num_queued_tokens", f"{number} prompt tokens wait (limit {limit})")

    def _refuse(self, reason: str, what: str) -> NoReturn:
        """429, to be tried again when what waits now is done, as far as that can be told."""
        self.metrics.record_rejection(reason)
        seconds = min(max(self.engine.queue_seconds, LEAST_RETRY_SECONDS), MOST_RETRY_SECONDS)
        raise overloaded(f"the server is overloaded: {what}", math.ceil(seconds))


def may_use(model: str) -> bool:
    """Whether the client of this request may use a model or adapter of this name."""
    client = CLIENT.get()
    return client is None or client.models is None or model in client.models


def new_id(prefix: str, request_id: str | None) -> str:
    """A response's id: the client's own request id, or a random one, behind OpenAI's prefix."""
    return f"{prefix}-{request_id or uuid.uuid4().hex}"
