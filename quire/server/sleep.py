"""POST /sleep, POST /wake_up and GET /is_sleeping, with `--enable-sleep-mode`: vLLM's routes."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Response

from quire.server.context import ServerContext
from quire.server.responses import json_response


class Sleeping(msgspec.Struct):
    is_sleeping: bool


def add_sleep_routes(app: FastAPI, context: ServerContext) -> None:
    """While the engine sleeps, generating requests get 503; /health stays 200, since waking brings everything back."""

    @app.post("/sleep")
    async def sleep(level: str = "1") -> Response:
        """level: 1 keeps the weights in host memory, 2 drops them. 400 while requests live."""
        context.check_alive()
        await context.engine.sleep(level)
        return json_response(Sleeping(True))

    @app.post("/wake_up")
    async def wake_up() -> Response:
        context.check_alive()
        await context.engine.wake_up()
        return json_response(Sleeping(False))

    @app.get("/is_sleeping")
    async def is_sleeping() -> Response:
        context.check_alive()
        return json_response(Sleeping(await context.engine.is_sleeping()))
