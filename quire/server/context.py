"""Context that all routes share: engine, settings and admission of requests."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from quire.engine.request_part import IN_BACKGROUND
from quire.errors import UnknownModelError, UserError, nearest_name
from quire.logging import get_logger
from quire.server.answer_format import AnswerFormats
from quire.server.errors import overloaded, unavailable
from quire.server.keys import Client
from quire.server.limits import CLIENT
from quire.server.request_share import Turns
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
"""Bounds of Retry-After, in seconds."""
MAX_LOGGED_FIELDS = 256
SYSTEM_FINGERPRINT = f"quire-{__version__}"


logger = get_logger(__name__)


@dataclass(slots=True)
class ServerContext:
    """Parts that all routes of one server share: engine, settings, models, counters. `created`: Unix time of its start,
    in seconds."""

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
    """Duration of each phase of the start."""
    num_errors: Callable[[int], int] = lambda _hundreds: 0
    """Returns the number of requests answered with a status from N00 to N99."""
    line_places: Turns | None = None
    """Request slots of lines of batches."""
    on_start: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks that begin work of the server's own. Called in the event loop."""
    on_drain: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks that end it, before running requests may be aborted."""
    on_close: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks that end responses which would stay open forever."""
    on_exit: list[Callable[[], object]] = field(default_factory=list)
    """Callbacks that write pending data; they may wait for other servers."""
    logged_fields: set[str] = field(default_factory=set)
    """Unknown fields that the log has named."""

    def start(self) -> None:
        """Begin the server's own work (`on_start`), in the event loop, once requests are answered."""
        for begin in self.on_start:
            begin()

    def drain(self) -> None:
        """Refuse new requests, at shutdown. Running ones go on."""
        self.draining = True
        for end in self.on_drain:
            end()

    def exit(self) -> None:
        for end in self.on_exit:
            end()

    def close(self) -> None:
        """End open streams (`on_close`); called after the last answer, before the HTTP server waits for its
        connections."""
        for end in self.on_close:
            end()

    def log_unknown_fields(self, path: str, names: list[str]) -> None:
        """Log each field without effect once, at most MAX_LOGGED_FIELDS in all."""
        for name in names:
            if name not in self.logged_fields and len(self.logged_fields) < MAX_LOGGED_FIELDS:
                self.logged_fields.add(name)
                logger.warning("%s: the field %.100r of a request has no effect (logged once)", path, name)

    def served_name(self, model: str | None) -> str:
        """Name of the model in the answer; None means the default. Raises UnknownModelError for an unknown name. With
        Ollama's API, `m` and `m:latest` are one model on all routes."""
        name = self._known_name(model)
        if name is None or not may_use(name):
            names = self.usable(self.names)
            asked = self.model_names[0] if model is None else model
            nearest, served = nearest_name(asked, names), ", ".join(names) or "none with this key"
            raise UnknownModelError(f"the model {asked!r} does not exist{nearest} (served: {served})", param="model")
        return name

    @property
    def names(self) -> list[str]:
        return [*self.model_names, *self.adapters.names]

    def usable(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if may_use(name)]

    async def meet(self, model: str) -> None:
        """Call ServedAdapters.meet, except for names that this request's client may not use."""
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
        """Raise UserError for a priority that `client` may not send. Ignored if the engine takes none."""
        low, high = client.priorities
        if self.engine.takes_priorities and not low <= priority <= high:
            raise UserError(
                f"priority must be between {low} and {high} on this server ({client.option}), not {priority}",
                param="priority",
            )

    def check_alive(self) -> None:
        """Raise 503 if the engine is dead or unresponsive, or the server shuts down."""
        self.engine.check_health()
        if self.draining:
            raise unavailable("the server is shutting down")

    def check_ready(self) -> None:
        """Raise 503 unless a request would run now: like `check_alive`, and while the engine sleeps, is paused or
        restarts."""
        self.check_alive()
        if self.engine.is_restarting:
            raise unavailable("the engine has died, and another one is starting")
        self.engine.check_awake()
        if self.engine.pauses:
            raise unavailable("the engine is paused")

    def admit(self) -> None:
        """Admit a new generating request. Raises 503 as `check_alive` does, while the engine sleeps and under a pause
        that keeps no requests; 429 if too many wait. Requests that the engine has not reported yet count as waiting;
        lines of batches neither count nor are refused."""
        self.check_alive()
        self.engine.check_awake()
        if self.engine.refuses_new:
            raise unavailable("the engine is paused, and takes requests again after POST /resume")
        if IN_BACKGROUND.get():
            return
        limit = self.settings.max_num_queued
        if limit is not None and (number := self.engine.num_waiting) >= limit:
            self._refuse("max_num_queued_reqs", f"{number} requests wait (limit {limit})")
        limit = self.settings.max_num_queued_tokens
        if limit is not None and (number := self.engine.num_queued_tokens) >= limit:
            self._refuse("max_num_queued_tokens", f"{number} prompt tokens wait (limit {limit})")

    def _refuse(self, reason: str, what: str) -> NoReturn:
        self.metrics.record_rejection(reason)
        seconds = min(max(self.engine.queue_seconds, LEAST_RETRY_SECONDS), MOST_RETRY_SECONDS)
        raise overloaded(f"the server is overloaded: {what}", math.ceil(seconds))


def may_use(model: str) -> bool:
    """True if this request's client may use the model or adapter of this name."""
    client = CLIENT.get()
    return client is None or client.models is None or model in client.models


def new_id(prefix: str, request_id: str | None) -> str:
    """Id of a response: OpenAI's prefix and the client's request id, or a random one."""
    return f"{prefix}-{request_id or uuid.uuid4().hex}"
