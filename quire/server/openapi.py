"""GET /openapi.json: the API's description, made from the structs that parse the requests."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Response

from quire.dashboard.frame import Frame
from quire.server.protocol.chat import ChatChunk, ChatRequest, ChatResponse
from quire.server.protocol.completion import CompletionRequest, CompletionResponse
from quire.server.protocol.models import ModelList
from quire.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from quire.version import __version__

_OPERATIONS: dict[str, tuple[str, type[msgspec.Struct] | None, type[msgspec.Struct]]] = {
    "/v1/completions": ("Complete a prompt", CompletionRequest, CompletionResponse),
    "/v1/chat/completions": ("Answer a conversation", ChatRequest, ChatResponse),
    "/v1/models": ("List the models", None, ModelList),
    "/tokenize": ("Text or a conversation to token ids", TokenizeRequest, TokenizeResponse),
    "/debug/kv": ("Every KV block and every live request", None, Frame),
    "/detokenize": ("Token ids to text", DetokenizeRequest, DetokenizeResponse),
}


def add_openapi_route(app: FastAPI) -> None:
    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(msgspec.json.encode(describe()), media_type="application/json")


def describe() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    structs = [struct for _, *pair in _OPERATIONS.values() for struct in pair if struct is not None]
    references, components = msgspec.json.schema_components(
        [*structs, ChatChunk], ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip([*structs, ChatChunk], references, strict=True))
    paths: dict[str, Any] = {}
    for path, (summary, request, response) in _OPERATIONS.items():
        answer = {"200": {"description": "OK", "content": _json(schemas[response])}}
        operation: dict[str, Any] = {"summary": summary, "responses": answer}
        if request is not None:
            operation["requestBody"] = {"required": True, "content": _json(schemas[request])}
        paths[path] = {"get" if request is None else "post": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
