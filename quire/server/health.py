"""GET /health, /ping, /version and /load."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Response

from quire.server.context import ServerContext
from quire.server.responses import json_response
from quire.version import __version__


class Health(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


class Load(msgspec.Struct):
    """server_load: requests that run or wait."""

    server_load: int


def add_health_routes(router: APIRouter, context: ServerContext) -> None:
    """Routes for probes: 200 while requests can be served, 503 once the engine is dead or the server drains."""

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        context.check_alive()
        return json_response(Health("ok"))

    @router.get("/version")
    async def version() -> Response:
        return json_response(Version(__version__))


def add_load_routes(router: APIRouter, context: ServerContext) -> None:
    @router.get("/load")
    async def load() -> Response:
        return json_response(Load(context.engine.num_unfinished))
