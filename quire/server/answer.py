"""The common part of all generating endpoints: the route, and the fields of an answer that are known before it
begins."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from quire.server.auth import client_of
from quire.server.body import parse_body, read_body
from quire.server.context import ServerContext, new_id
from quire.server.disconnect import run_until_disconnect
from quire.server.generation import TokenCounter
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completion import CompletionRequest
from quire.server.responses import json_response
from quire.server.streaming import EventStream

Body = TypeVar("Body", ChatRequest, CompletionRequest)


class Answer(ABC, Generic[Body]):
    """One request being answered, as a whole or as a stream."""

    ID_PREFIX: str

    def __init__(self, context: ServerContext, body: Body) -> None:
        """Raises UserError or UnknownModelError for what is wrong with the request."""
        self._body: Body = body
        self._context = context
        self._model = context.served_name(body.model)
        self._params = body.to_sampling_params()
        self._created = int(time.time())
        self.response_id = new_id(self.ID_PREFIX, body.request_id)
        self._counter = TokenCounter()

    @abstractmethod
    async def complete(self) -> msgspec.Struct:
        """The whole answer."""

    @abstractmethod
    def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, each as soon as there is something to say."""


def add_answer_route(
    app: FastAPI,
    path: str,
    context: ServerContext,
    body_type: type[Body],
    answer_type: Callable[[ServerContext, Body], Answer[Body]],
) -> None:
    """POST `path`: a client that hangs up ends its request, be it streaming or not."""

    @app.post(path)
    async def create(request: Request) -> Response:
        body = parse_body(await read_body(request, context.max_body_bytes), body_type)
        context.admit()
        context.check_priority(body.priority, client_of(request))
        answer = answer_type(context, body)
        headers = {"X-Request-Id": answer.response_id}
        if body.stream:
            return EventStream(answer.stream(), headers)
        return json_response(await run_until_disconnect(request.receive, answer.complete()), headers)
