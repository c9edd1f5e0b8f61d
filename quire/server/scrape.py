"""GET /metrics, and the middleware that counts HTTP requests.

The scraper chooses only the format.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from fastapi import FastAPI, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import EngineDeadError, EngineUnresponsiveError
from quire.metrics.families import OUR_PREFIX
from quire.server.auth import public
from quire.server.context import ServerContext
from quire.server.disconnect import CLIENT_CLOSED_REQUEST
from quire.utils.shared_numbers import Numbers

SNAPSHOT_SECONDS = 1.0
"""Maximum wait of a scrape for fresh numbers, shorter than any scraper's timeout."""


def add_metrics_route(app: FastAPI, context: ServerContext) -> None:
    async def metrics(request: Request) -> Response:
        # An engine that is dead, silent, or in a long step sends nothing: the last snapshot is answered.
        with contextlib.suppress(EngineDeadError, EngineUnresponsiveError, TimeoutError):
            async with asyncio.timeout(SNAPSHOT_SECONDS):
                context.metrics.record_stats(await context.engine.stats())
        encode, content_type = _encoder_for(request.headers.get("accept", ""))
        return Response(encode(context.metrics.registry), media_type=content_type)

    app.get("/metrics")(metrics if context.settings.protect_metrics else public(metrics))


UNMATCHED, OTHER = "unmatched", "other"
METHODS = ("GET", "POST", "HEAD", "DELETE", "OPTIONS", "PUT", "PATCH", OTHER)
NUM_STATUSES = 600
OPEN_METRICS = "application/openmetrics-text"


def _encoder_for(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """Choose encoder and content type for an Accept header: OpenMetrics 1.0 if named and not ranked below text, else
    text format 0.0.4."""
    weights = {"text/plain": 0.0, OPEN_METRICS: 0.0}
    for part in accept.lower().split(","):
        kind, *parameters = (token.strip() for token in part.split(";"))
        if kind in weights:
            weights[kind] = max(weights[kind], _quality(parameters))
    if weights[OPEN_METRICS] and weights[OPEN_METRICS] >= weights["text/plain"]:
        return partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
    return partial(generate_latest, escaping=openmetrics.ALLOWUTF8), CONTENT_TYPE_PLAIN_0_0_4


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 1.0
    return 1.0


class HttpCounter(Collector):
    """HTTP requests by route, method and status."""

    def __init__(self, paths: Iterable[str], numbers: Numbers) -> None:
        """paths: patterns of all routes. All other paths share one label; so do methods outside METHODS."""
        handlers = [*dict.fromkeys(paths), UNMATCHED]
        self._rows = {row: place for place, row in enumerate(itertools.product(handlers, METHODS))}
        self._any = numbers.allocate(len(self._rows))
        """Counts over all statuses."""
        self._cells = numbers.allocate(len(self._rows) * NUM_STATUSES)
        self._classes = numbers.allocate(NUM_STATUSES // 100)

    def count_response(self, handler: str, method: str, status: int) -> None:
        row = self._rows[handler, method if method in METHODS else OTHER]
        self._any.own[row] += 1
        self._cells.own[row * NUM_STATUSES + status] += 1
        self._classes.own[status // 100] += 1

    def count_of(self, hundreds: int) -> int:
        """Requests answered with a status of 400 to 499, for `hundreds` 4."""
        return int(self._classes.total(hundreds))

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            OUR_PREFIX + "http_requests", "HTTP requests answered.", labels=["handler", "method", "status"]
        )
        for (handler, method), row in self._rows.items():
            if self._any.total(row):
                for status in range(NUM_STATUSES):
                    if count := self._cells.total(row * NUM_STATUSES + status):
                        family.add_metric([handler, method, str(status)], count)
        yield family


class CountingMiddleware:
    """Middleware that counts each finished request under its route's pattern."""

    def __init__(self, app: ASGIApp, counter: HttpCounter) -> None:
        self.app = app
        self.counter = counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = CLIENT_CLOSED_REQUEST

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            route = scope.get("route")
            method = scope["method"] if route is not None else OTHER
            self.counter.count_response(getattr(route, "path", UNMATCHED), method, status)
