"""The HTTP application: routes, doors and handlers put together around one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware

from quire.errors import ModelLoadError
from quire.metrics.prometheus import EngineMetrics
from quire.server.auth import key_check
from quire.server.chat import add_chat_routes
from quire.server.completions import add_completion_routes
from quire.server.context import ServerContext
from quire.server.errors import install_error_handlers
from quire.server.health import SilenceGauge, add_health_routes
from quire.server.home import add_home_route
from quire.server.json_bodies import JsonBodies
from quire.server.keys import KeyRing
from quire.server.live import add_live_routes
from quire.server.models import add_model_routes
from quire.server.openapi import add_openapi_route
from quire.server.pooling import add_pooling_routes
from quire.server.scrape import CountingMiddleware, HttpCounter, add_metrics_route
from quire.server.settings import ServerSettings
from quire.server.site import HostRules, SiteGuard
from quire.server.sleep import add_sleep_routes
from quire.server.tokenize import add_tokenize_routes
from quire.version import __version__

if TYPE_CHECKING:
    from quire.engine.async_engine import AsyncLLM


def create_app(engine: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """Make the application; `app.state.context` is its ServerContext. Waits until the engine is ready.

    Raises ModelLoadError when the model has no tokenizer.
    """
    if engine.tokenizer is None:
        raise ModelLoadError(f"the model {engine.model_config.name!r} has no tokenizer: serving needs one")
    names = tuple(settings.served_model_name) or (engine.model_config.name,)
    metrics = EngineMetrics(
        names[0],
        block_size=engine.ready.block_size,
        num_blocks=engine.ready.num_blocks,
        max_model_len=engine.ready.max_model_len,
    )
    engine.add_listener(metrics)
    metrics.registry.register(SilenceGauge(lambda: engine.silence))
    context = ServerContext(engine, engine.tokenizer, settings, metrics, names, settings.max_body_bytes)

    app = FastAPI(
        title="Quire",
        version=__version__,
        openapi_url=None,
        redirect_slashes=False,  # the address to go to would be made of the client's Host
        dependencies=[Depends(key_check(KeyRing.of(settings)))],
    )
    app.state.context = context
    add_completion_routes(app, context)
    add_chat_routes(app, context)
    add_pooling_routes(app, context)
    add_model_routes(app, context)
    add_tokenize_routes(app, context)
    add_health_routes(app, context)
    add_metrics_route(app, context)
    add_live_routes(app, context)
    if settings.enable_sleep_mode:
        add_sleep_routes(app, context)
    add_home_route(app)
    add_openapi_route(app)

    install_error_handlers(app)
    add_middleware(app, settings, metrics)
    return app


def add_middleware(app: FastAPI, settings: ServerSettings, metrics: EngineMetrics) -> None:
    """What every request passes before its route is looked for: the one added last sees it first."""
    app.add_middleware(JsonBodies, max_total_bytes=settings.max_total_body_bytes)
    if settings.cors_allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    hosts = HostRules(settings.host, settings.allowed_hosts)
    app.add_middleware(SiteGuard, hosts=hosts, origins=settings.cors_allowed_origins)
    counter = HttpCounter()
    metrics.registry.register(counter)
    app.add_middleware(CountingMiddleware, counter=counter)
