"""Server of /metrics alone, for `quire run-batch --enable-metrics`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from quire.server.context import ServerContext
from quire.server.errors import install_error_handlers
from quire.server.http_protocol import make_http_server
from quire.server.listener import Listener
from quire.server.scrape import add_metrics_route
from quire.server.settings import ServerSettings
from quire.server.site import HostRules, SiteGuard

STARTED_SECONDS = 0.005
"""Seconds between checks that the server listens."""


@contextlib.asynccontextmanager
async def serving_metrics(context: ServerContext, settings: ServerSettings, listener: Listener) -> AsyncIterator[None]:
    """Serve /metrics on `listener`, with the connection limits of `settings`, until the context ends. Raises
    ConfigError if another server has taken the address."""
    listener.listen()
    app = FastAPI(openapi_url=None)
    add_metrics_route(app, context)
    install_error_handlers(app)
    app.add_middleware(SiteGuard, hosts=HostRules(settings.host, settings.allowed_hosts), origins=[])
    server = make_http_server(app, settings, shutdown_grace_seconds=1)
    serving = asyncio.ensure_future(server.serve(sockets=[listener.socket]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(STARTED_SECONDS)
        if serving.done():
            await serving  # raises the reason it does not listen
        yield
    finally:
        server.should_exit = True
        await serving
