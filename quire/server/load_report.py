"""Engine load in a response header, in vLLM's form, for load balancers (ORCA, Open Request Cost Aggregation)."""

from __future__ import annotations

import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.kv_cache.stats import shares
from quire.metrics.prometheus import EngineMetrics

ASKS = b"endpoint-load-metrics-format"
ANSWERS = b"endpoint-load-metrics"


class LoadReports:
    """Middleware that adds `endpoint-load-metrics` to successful responses if the request has
    `endpoint-load-metrics-format: TEXT` or `JSON`."""

    def __init__(self, app: ASGIApp, metrics: EngineMetrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = next((value for name, value in scope.get("headers", ()) if name == ASKS), None)
        if scope["type"] != "http" or wanted is None or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return

        async def report(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                value = self._value(wanted.decode("latin-1").strip().upper())
                if value is not None:
                    message["headers"] = [*message["headers"], (ANSWERS, value.encode())]
            await send(message)

        await self.app(scope, receive, report)

    def _value(self, form: str) -> str | None:
        stats = self._metrics.stats
        named: dict[str, float] = {
            "kv_cache_usage_perc": shares(stats)["kv_cache_usage"],
            "num_requests_waiting": float(stats.num_waiting),
        }
        if form == "JSON":
            return f"JSON {json.dumps({'named_metrics': named})}"
        if form == "TEXT":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
        return None
