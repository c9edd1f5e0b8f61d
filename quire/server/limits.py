from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable
from contextvars import ContextVar
from typing import TYPE_CHECKING

from quire.clock import Clock, SystemClock
from quire.engine.request_part import IN_BACKGROUND
from quire.outputs import RequestOutput
from quire.server.errors import overloaded
from quire.utils.shared_numbers import Numbers

if TYPE_CHECKING:
    from quire.metrics.prometheus import EngineMetrics
    from quire.server.keys import Client

SECONDS = 60.0
CLIENT: ContextVar[Client | None] = ContextVar("client_of_request", default=None)
"""Client whose request the running task answers; None on a route without keys."""
OWNER: ContextVar[str] = ContextVar("owner_of_request", default="")
"""Digest of the key that the request brought (quire/server/auth.py)."""


class Allowance:
    """Allowance per minute, refilled evenly; at most one minute's is saved.

    An answer's tokens count afterwards and may make it negative.
    """

    def __init__(self, per_minute: int, numbers: Numbers, clock: Clock) -> None:
        """per_minute: units refilled. numbers: counters shared by all API processes."""
        self.per_minute = per_minute
        self._clock = clock
        self._numbers = numbers
        self._common = numbers.allocate(2).common
        """[used and not refilled, time of that count]."""

    def seconds_until(self, amount: float) -> float:
        return self.use_if_left(0.0, amount)

    def use_if_left(self, amount: float, needed: float) -> float:
        """Use `amount` if `needed` is left. Returns the seconds until then; 0: used."""
        with self._numbers.lock():
            left = self.per_minute - self._refill()
            if needed <= left:
                self._common[0] += amount
        return max(0.0, (needed - left) * SECONDS / self.per_minute)

    def use(self, amount: float) -> None:
        with self._numbers.lock():
            self._common[0] = self._refill() + amount

    def _refill(self) -> float:
        now = self._clock.now()
        used, at = self._common
        self._common[0] = max(0.0, used - (now - at) * self.per_minute / SECONDS)
        self._common[1] = now
        return self._common[0]


class RateLimit:
    """Rate limits of one key (requests, tokens a minute), for all its requests together."""

    def __init__(self, requests: int | None, tokens: int | None, numbers: Numbers, clock: Clock | None = None) -> None:
        """requests, tokens: maximum per minute, at least 1, or None. Tokens of prompts and answers count."""
        clock = clock or SystemClock()
        self._requests = None if requests is None else Allowance(requests, numbers, clock)
        self._tokens = None if tokens is None else Allowance(tokens, numbers, clock)

    def count_request(self) -> None:
        """Count a request. Raises ApiError (429, with the seconds to wait) if too many came or earlier ones used up the
        tokens. A line of a batch leaves half a minute's allowance to other requests of the key."""
        for allowance, amount, what in ((self._tokens, 0, "tokens"), (self._requests, 1, "requests")):
            if allowance is None:
                continue
            per_minute = allowance.per_minute
            needed = min(per_minute, 1 + per_minute / 2) if IN_BACKGROUND.get() else 1
            seconds = allowance.use_if_left(amount, needed)
            if seconds > 0:
                message = f"this API key may use {per_minute} {what} a minute"
                raise overloaded(message, math.ceil(seconds))

    def use_tokens(self, count: int) -> None:
        if self._tokens is not None and count:
            self._tokens.use(count)


CHARGE: ContextVar[Charge | None] = ContextVar("charge", default=None)
"""Charge of the running task's part; None for a whole request."""


class Charge:
    """Charge of one request to its client: one request and the computed tokens."""

    def __init__(self, metrics: EngineMetrics) -> None:
        """Count a request; a refusal (ApiError) in `metrics`."""
        client = CLIENT.get()
        self._limit = None if client is None else client.limit
        self._prompts: set[Hashable] = set()
        if self._limit is not None:
            try:
                self._limit.count_request()
            except Exception:
                metrics.record_rejection("rate_limit")
                raise

    def count(self, prompt: Hashable, output: RequestOutput) -> None:
        """Charge an output's new tokens, and prompt tokens with each `prompt`'s first output."""
        if self._limit is None:
            return
        if prompt not in self._prompts:
            self._prompts.add(prompt)
            self._limit.use_tokens(len(output.prompt_token_ids))
        self._limit.use_tokens(sum(len(completion.token_ids) for completion in output.outputs))


def names_owner(cache_salt: str | None) -> str:
    """Owner of a request's names for pictures: its key's digest and its salt. cache_salt: request's own."""
    return f"{OWNER.get()}:{client_salt(cache_salt)}"


def client_salt(given: str | None) -> str:
    """Cache salt of a request: its key's combined with `given`, its own."""
    client = CLIENT.get()
    if client is None or not client.cache_salt:
        return given or ""
    return hashlib.sha256(f"{client.cache_salt}\0{given or ''}".encode()).hexdigest()
