"""Routes for probes and routers: /health, /ready, /ping, /version and /load."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from fastapi import FastAPI, Response
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.metrics.families import OUR_PREFIX, THEIR_PREFIX
from quire.multimodal.cache import ReadyImages
from quire.server.auth import public
from quire.server.context import ServerContext
from quire.server.responses import json_response
from quire.version import __version__


class Health(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


class ServerLoad(msgspec.Struct):
    """Body of /load. server_load: requests that run or wait."""

    server_load: int


def add_health_routes(app: FastAPI, context: ServerContext) -> None:
    """/health is 200 while requests can be served; 503 once the engine is dead or unresponsive
    (quire/engine/heartbeat.py) or the server drains. /ready is also 503 while the engine sleeps, is paused or
    restarts."""

    @app.get("/health")
    @app.head("/health")  # some load balancers send HEAD
    @app.get("/ping")
    @app.post("/ping")
    @public
    async def health() -> Response:
        context.check_alive()
        return json_response(Health("ok"))

    @app.get("/ready")
    @app.head("/ready")
    @public
    async def ready() -> Response:
        context.check_ready()
        return json_response(Health("ready"))

    @app.get("/version")
    @public
    async def version() -> Response:
        return json_response(Version(__version__))

    @app.get("/load")
    async def load() -> Response:
        return json_response(ServerLoad(context.engine.num_pending))


class SilenceGauge(Collector):
    def __init__(self, silence: Callable[[], float]) -> None:
        self._silence = silence

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            OUR_PREFIX + "engine_silence_seconds",
            "Seconds without a sign of life of the engine process; it gives one a second.",
            value=self._silence(),
        )


class PictureCounters(Collector):
    """Hits of the cache of prepared images, under vLLM's names."""

    def __init__(self, kept: ReadyImages) -> None:
        self._kept = kept

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            THEIR_PREFIX + "mm_cache_queries",
            "Files of pictures that were looked up among processed ones.",
            value=self._kept.num_queries,
        )
        yield CounterMetricFamily(
            THEIR_PREFIX + "mm_cache_hits", "Files of pictures that were not decoded again.", value=self._kept.num_hits
        )


class RestartCounter(Collector):
    def __init__(self, num_restarts: Callable[[], int]) -> None:
        self._num_restarts = num_restarts

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            OUR_PREFIX + "engine_restarts",
            "Engines that were started after one had died.",
            value=self._num_restarts(),
        )
