"""SageMaker's POST /invocations, for requests of any generating or pooling route."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.routing import Route
from starlette.types import Message

from quire.errors import UserError
from quire.server.body import read_body
from quire.server.context import ServerContext
from quire.server.errors import invalid_request
from quire.server.protocol.common import RequestStruct
from quire.server.protocol.pooling import FIRST_NAMES
from quire.server.reading import read_names

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_OF_TASKS = {"embed": "/v1/embeddings", "classify": "/classify"}
"""Task of a pooling model -> route of its texts."""


class InvocationRequest(RequestStruct, kw_only=True, frozen=True):
    """A route's body, told by fields (OpenAPI only): `messages` or `prompt` for generating models; for pooling models
    `input` or `messages`, `text_1` with `text_2` (by any names), or `query` with `documents`."""

    messages: Any = None
    prompt: Any = None
    input: Any = None
    text_1: Any = None
    query: Any = None
    stream: bool = False


class InvocationResponse(msgspec.Struct):
    """Answer of POST /invocations: that of the route for the body (OpenAPI only)."""


def add_invocation_route(app: FastAPI, context: ServerContext) -> None:
    @app.post("/invocations")
    async def invoke(request: Request) -> Response:
        body = await read_body(request, context.max_body_bytes)
        path = path_of(await read_names(request, context, body), _task_of(context))
        [endpoint] = [route.endpoint for route in app.routes if isinstance(route, Route) and route.path == path]
        response: Response = await endpoint(Request(request.scope, _Again(body, request)))
        return response


class _Again:
    """Receive channel that replays a body, then continues with the request's own messages."""

    def __init__(self, body: list[bytes], request: Request) -> None:
        self._parts = [*body, b""]
        self._request = request

    async def __call__(self) -> Message:
        if not self._parts:
            return await self._request.receive()
        part = self._parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self._parts)}


def _task_of(context: ServerContext) -> str | None:
    for task in _OF_TASKS:
        try:
            context.engine.pooling.check_task(task)
        except UserError:
            continue
        return task
    return None


def path_of(names: Collection[str], task: str | None) -> str:
    """Route for a body with these fields. task: result of `_task_of`. Raises ApiError (400) if no route fits."""
    if task is None:
        known = {"messages": _CHAT, "prompt": _COMPLETION}
    else:
        path = _OF_TASKS[task]
        known = {"input": path, "messages": path, **dict.fromkeys(FIRST_NAMES, "/score"), "query": "/rerank"}
    for name, path in known.items():
        if name in names:
            return path
    raise invalid_request(f"Cannot find suitable handler for request. Expected one of: {', '.join(known)}")
