"""GET /debug/kv, /debug/kv/events and /debug/kv/history: all KV blocks and live requests, once or as they change, and
samples of the last 15 minutes."""

from __future__ import annotations

import math

import msgspec
from fastapi import FastAPI, Request, Response

from quire.dashboard.feed import Feed
from quire.dashboard.frame import Frame, Observations
from quire.dashboard.recent import RecentRequests
from quire.dashboard.trail import Trail, TrailSample
from quire.kv_cache.stats import shares
from quire.server.auth import has_admin_key
from quire.server.context import ServerContext
from quire.server.errors import invalid_request
from quire.server.query import takes_query
from quire.server.responses import json_response
from quire.server.streaming import EventStream
from quire.version import __version__

DEFAULT_RATE, MIN_RATE, MAX_RATE = 4.0, 0.1, 10.0
"""Events per second."""


class KVHistory(msgspec.Struct):
    """Samples of the last 15 minutes, oldest first. is_admin: the request's key is an admin's."""

    samples: list[TrailSample]
    is_admin: bool


def add_live_routes(app: FastAPI, context: ServerContext) -> None:
    """Add the routes. They need the key, unlike the page that shows them."""
    encoder = msgspec.json.Encoder()

    async def poll() -> bytes:
        return encoder.encode(await take_frame(context, recent))

    recent = RecentRequests()
    context.metrics.on_finished.append(recent.note)
    feed = Feed(poll)
    context.on_close.append(feed.close)
    first = context.metrics.time_to_first_token
    trail = Trail(lambda: (first.sum, first.count))
    context.engine.add_listener(trail)

    @app.get("/debug/kv")
    async def kv() -> Response:
        return json_response(await take_frame(context, recent), {"Cache-Control": "no-store"})

    @app.get("/debug/kv/events")
    @takes_query("rate")
    async def kv_events(request: Request) -> Response:
        return EventStream(feed.events(parse_rate(request.query_params.get("rate"))))

    @app.get("/debug/kv/history")
    async def kv_history(request: Request) -> Response:
        return json_response(KVHistory(trail.samples(), has_admin_key(request)), {"Cache-Control": "no-store"})


async def take_frame(context: ServerContext, recent: RecentRequests) -> Frame:
    """Collect the engine's state and recent requests for the dashboard. Raises EngineDeadError."""
    kv = await context.engine.kv_snapshot()
    metrics = context.metrics
    # The engine's answer came with a snapshot of the counters; the metrics already hold it.
    return Frame(
        version=__version__,
        model=context.model_names[0],
        backend=context.engine.ready.backend,
        max_model_len=context.engine.ready.max_model_len,
        task=task_of(context),
        is_draining=context.draining,
        time_to_first_token=Observations(metrics.time_to_first_token.sum, metrics.time_to_first_token.count),
        stats=metrics.stats,
        kv=kv,
        shares=shares(metrics.stats),
        recent=recent.recent(),
        outcomes=metrics.outcomes(),
        num_client_errors=context.num_errors(4),
        num_server_errors=context.num_errors(5),
    )


def task_of(context: ServerContext) -> str:
    pooling = context.engine.model_config.pooling
    if pooling is not None:
        return pooling.task
    return "completion" if context.tokenizer.chat_template is None else "chat"


def parse_rate(text: str | None) -> float:
    """Events per second (None: DEFAULT_RATE). Raises ApiError (400) outside `MIN_RATE` to `MAX_RATE`."""
    if text is None:
        return DEFAULT_RATE
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not MIN_RATE <= rate <= MAX_RATE:
        raise invalid_request(f"rate must be a number from {MIN_RATE:g} to {MAX_RATE:g}, not {text!r}", param="rate")
    return rate
