"""GET /openapi.json: the API's description, made from the structs that parse the requests."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Response

from quire.dashboard.frame import Frame
from quire.server.errors import ErrorBody
from quire.server.protocol.chat import ChatChunk, ChatRequest, ChatResponse
from quire.server.protocol.completion import CompletionRequest, CompletionResponse
from quire.server.protocol.models import ModelList
from quire.server.protocol.pooling import (
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from quire.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from quire.version import __version__

ERRORS = {
    400: "The request is wrong: the message and `param` say where",
    401: "The API key is missing or wrong",
    403: "The request comes from a web page of another origin",
    404: "The model is not served here, or cannot do this",
    408: "The request did not arrive in time",
    413: "The body is larger than the limit",
    415: "The body is not JSON",
    421: "The Host is none of this server's names",
    429: "Too many requests wait already: try again later",
    431: "The request's head is too large",
    500: "The model computed no numbers, or the server failed",
    503: "The server is shutting down, asleep, or its engine is gone",
}
"""Status -> what it means, on every route of this document unless said otherwise below."""

READING_A_BODY = frozenset({413})
"""Of routes that read one. The heads of all requests have a time limit, and any body must be JSON, read or not."""
GENERATING = frozenset({429})
"""Of requests that wait for a place in the batch."""
CONVERTING = frozenset({"/tokenize", "/detokenize"})
"""Routes whose requests the engine does not see."""
NAMING_A_MODEL = frozenset({404})
RENDERING = frozenset({"/v1/chat/completions", "/tokenize"})
"""Routes that render chat templates, in a process of their own."""

_OPERATIONS: dict[str, tuple[str, type[msgspec.Struct] | None, type[msgspec.Struct]]] = {
    "/v1/completions": ("Complete a prompt", CompletionRequest, CompletionResponse),
    "/v1/chat/completions": ("Answer a conversation", ChatRequest, ChatResponse),
    "/v1/embeddings": ("Vectors of texts", EmbeddingRequest, EmbeddingResponse),
    **dict.fromkeys(("/score", "/v1/score"), ("Scores of pairs of texts", ScoreRequest, ScoreResponse)),
    **dict.fromkeys(
        ("/rerank", "/v1/rerank", "/v2/rerank"),
        ("Documents in the order of their relevance", RerankRequest, RerankResponse),
    ),
    "/classify": ("Labels of texts", ClassificationRequest, ClassificationResponse),
    "/pooling": ("What the model makes of texts", PoolingRequest, PoolingResponse),
    "/v1/models": ("List the models", None, ModelList),
    "/tokenize": ("Text or a conversation to token ids", TokenizeRequest, TokenizeResponse),
    "/debug/kv": ("Every KV block and every live request", None, Frame),
    "/detokenize": ("Token ids to text", DetokenizeRequest, DetokenizeResponse),
}


def add_openapi_route(app: FastAPI) -> None:
    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(msgspec.json.encode(api_description()), media_type="application/json")


def api_description() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    structs = [struct for _, *pair in _OPERATIONS.values() for struct in pair if struct is not None]
    references, components = msgspec.json.schema_components(
        [*structs, ChatChunk, ErrorBody], ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip([*structs, ChatChunk, ErrorBody], references, strict=True))
    paths: dict[str, Any] = {}
    for path, (summary, request, response) in _OPERATIONS.items():
        answer = {"200": {"description": "OK", "content": _json(schemas[response])}}
        for status in statuses(path, takes_body=request is not None):
            answer[str(status)] = {"description": _meaning(status, path), "content": _json(schemas[ErrorBody])}
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


def statuses(path: str, *, takes_body: bool) -> list[int]:
    """The error statuses that a route can answer with."""
    left_out = set() if takes_body else {*READING_A_BODY, *NAMING_A_MODEL}
    if path in CONVERTING or not takes_body:
        left_out |= GENERATING
    return [status for status in ERRORS if status not in left_out]


def _meaning(status: int, path: str) -> str:
    if status == 500 and path in RENDERING:
        return f"{ERRORS[status]}, or the process that renders chat templates ended (`chat_template_error`)"
    return ERRORS[status]


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
