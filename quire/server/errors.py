"""All errors that clients see, in the shapes of OpenAI or of other APIs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import Scope

from quire.errors import (
    ChatTemplateProcessError,
    EngineDeadError,
    InternalError,
    ModelOutputError,
    PromptTooLongError,
    QuireError,
    UnknownModelError,
    UserError,
    in_terms,
    new_error_id,
)
from quire.logging import get_logger
from quire.server.disconnect import CLIENT_CLOSED_REQUEST, ClientDisconnectedError

logger = get_logger(__name__)

MAX_SHOWN_CHARACTERS = 200
"""Characters shown of an unknown path."""


MAX_MESSAGE_CHARACTERS = 1000
MAX_PARAM_CHARACTERS = 200


class ErrorDetail(msgspec.Struct):
    """code: word for the fault; a server that follows vLLM sends the HTTP status instead, and the
    word as `reason`. Shortens `message` and `param`, which may quote the client."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None
    reason: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        self.message = shorten(self.message, MAX_MESSAGE_CHARACTERS)
        if self.param is not None:
            self.param = shorten(self.param, MAX_PARAM_CHARACTERS)


def shorten(text: str, limit: int) -> str:
    """Text for an error, at most `limit` characters: its beginning, length and end."""
    if len(text) <= limit:
        return text
    note = f" ... ({len(text)} characters) ... "
    num_last = limit // 4
    return text[: limit - num_last - len(note)] + note + text[-num_last:]


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


_ERROR_TYPES = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


def error_type(status: int) -> str:
    """Error type for a status on all routes but Anthropic's: vLLM's names, for which OpenAI's clients raise exceptions
    (docs/decisions/0043-one-pipeline-of-answers.md)."""
    return _ERROR_TYPES.get(status, "BadRequestError")


MESSAGES_PATH = "/v1/messages"
"""Path prefix of errors in Anthropic's shape."""


class MessagesErrorDetail(msgspec.Struct):
    type: str
    message: str
    details: dict[str, str] | UnsetType = UNSET


class MessagesErrorBody(msgspec.Struct):
    """Error in Anthropic's shape."""

    error: MessagesErrorDetail
    type: str = "error"


_MESSAGES_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_MESSAGES_ERROR_DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}
"""Wrong field -> details that tell clients to send the whole conversation instead."""


OLLAMA_PREFIX = "/api/"
"""Path prefix of errors in Ollama's shape."""


class OllamaErrorBody(msgspec.Struct):
    error: str


LLAMA_CPP_PATHS = frozenset(
    {
        "/chat/completions",
        "/chat/completions/input_tokens",
        "/completion",
        "/completions",
        "/infill",
        "/props",
        "/slots",
        "/embedding",
        "/embeddings",
        "/apply-template",
        "/lora-adapters",
        "/v1/health",
    }
)


class LlamaErrorDetail(msgspec.Struct):
    """n_prompt_tokens: size of a too long prompt; uncounted: n_ctx + 1."""

    code: int
    message: str
    type: str
    n_prompt_tokens: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class LlamaErrorBody(msgspec.Struct):
    error: LlamaErrorDetail


_LLAMA_CPP_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """Error with its HTTP status; made by `api_error`. detail: the part that clients read. num_tokens: see
    PromptTooLongError."""

    def __init__(
        self,
        status: int,
        detail: ErrorDetail,
        headers: Mapping[str, str] | None = None,
        num_tokens: int | None = None,
    ) -> None:
        super().__init__(detail.message)
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})
        self.num_tokens = num_tokens

    def named(self, names: Mapping[str, str]) -> ApiError:
        """Error with the request's field names; see UserError.named."""
        message, param = in_terms(self.detail.message, self.detail.param, names)
        detail = msgspec.structs.replace(self.detail, message=message, param=param)
        return ApiError(self.status, detail, self.headers, self.num_tokens)


def api_error(
    status: int,
    message: str,
    code: str | None = None,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> ApiError:
    return ApiError(status, ErrorDetail(message, error_type(status), param, code), headers)


def invalid_request(message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> ApiError:
    return api_error(status, message, code, param=param)


def unavailable(message: str) -> ApiError:
    """503: the server shuts down or its engine is gone."""
    return api_error(503, message, "service_unavailable")


def overloaded(message: str, retry_after: int) -> ApiError:
    """Error 429. retry_after: seconds until a retry makes sense."""
    return api_error(429, message, "rate_limit_exceeded", headers={"Retry-After": str(retry_after)})


def to_api_error(error: BaseException) -> ApiError:
    """Turn any exception into an error for the client. Internal facts (paths, stack frames, unexpected messages) go to
    the log, under an id that the client gets."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLongError):
        code = "context_length_exceeded"
        detail = ErrorDetail(error.message, error_type(400), error.param or "prompt", code)
        return ApiError(400, detail, num_tokens=error.num_tokens)
    if isinstance(error, UnknownModelError):
        return invalid_request(error.message, param="model", code="model_not_found", status=404)
    if isinstance(error, UserError):
        return invalid_request(error.message, param=error.param)
    if isinstance(error, EngineDeadError):
        return unavailable(f"the engine is dead: {error.summary} ({_see_log(error.error_id)})")
    if isinstance(error, InternalError):
        return _internal_error(error, error.summary, error.error_id)
    if isinstance(error, ModelOutputError):  # concerns this request alone; a retry would probably fail again
        return api_error(500, str(error), "model_error")
    if isinstance(error, ChatTemplateProcessError):  # the template failed for this request alone
        return api_error(500, str(error), "chat_template_error")
    if isinstance(error, QuireError):
        return unavailable(str(error))
    if isinstance(error, HTTPException):
        return api_error(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, ClientDisconnectedError | ClientDisconnect):
        return invalid_request("the client closed the connection", status=CLIENT_CLOSED_REQUEST)
    return _internal_error(error, "internal server error", new_error_id())


def _internal_error(error: BaseException, summary: str, error_id: str) -> ApiError:
    logger.error("error %s: %s", error_id, summary, exc_info=error)
    return api_error(500, f"{summary} ({_see_log(error_id)})", "internal_error")


def _see_log(error_id: str) -> str:
    return f"error {error_id}; the server's log says more"


def error_body(error: ApiError, scope: Scope) -> bytes:
    """JSON body of an error. scope: request's ASGI scope; its path and server decide the shape."""
    path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
    if path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/"):
        kind = _MESSAGES_ERROR_TYPES.get(error.status, "invalid_request_error")
        details = _MESSAGES_ERROR_DETAILS.get(error.detail.param or "", UNSET)
        return msgspec.json.encode(MessagesErrorBody(MessagesErrorDetail(kind, error.detail.message, details)))
    if path.startswith(OLLAMA_PREFIX):
        return msgspec.json.encode(OllamaErrorBody(error.detail.message))
    if path in LLAMA_CPP_PATHS:
        return msgspec.json.encode(LlamaErrorBody(_llama_error(error, scope)))
    detail, code = error.detail, error.detail.code
    if follows_vllm(scope.get("app")):
        detail = msgspec.structs.replace(detail, code=error.status, reason=UNSET if code is None else str(code))
    return msgspec.json.encode(ErrorBody(detail))


def _llama_error(error: ApiError, scope: Scope) -> LlamaErrorDetail:
    kind = _LLAMA_CPP_ERROR_TYPES.get(error.status, "invalid_request_error")
    found = LlamaErrorDetail(error.status, error.detail.message, kind)
    if error.detail.code == "context_length_exceeded":
        found.type = "exceed_context_size_error"
        length = scope["app"].state.context.engine.ready.max_model_len
        found.n_prompt_tokens, found.n_ctx = error.num_tokens or length + 1, length
        size = f"({found.n_prompt_tokens} tokens) exceeds the available context size ({length} tokens)"
        found.message = f"the request {size}: {found.message}"
    return found


def follows_vllm(app: object) -> bool:
    """True if the application's settings ask for vLLM's error codes."""
    return getattr(getattr(app, "state", None), "follows_vllm", False)


def error_response(error: ApiError, scope: Scope) -> Response:
    return Response(error_body(error, scope), error.status, error.headers, media_type="application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception, unknown path and wrong method with an error body."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            error = _no_such_route(request, error)
        return error_response(to_api_error(error), request.scope)

    for kind in (ApiError, QuireError, HTTPException, ClientDisconnectedError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, handle)


def _no_such_route(request: Request, error: HTTPException) -> ApiError:
    what = shorten(f"{request.method} {request.scope['path']}", MAX_SHOWN_CHARACTERS)
    if error.status_code == 404:
        unserved = getattr(request.app.state, "unserved", ())
        flags = [flag for route, flag in unserved if route.matches(request.scope)[0] is not Match.NONE]
        hint = f"; it is served with {flags[0]}" if flags else ""
        return api_error(404, f"unknown request URL: {what}{hint}", "unknown_url")
    # The router names the methods of one route only; a path may match several. A route without parameters wins over one
    # that would read the path's end as an id.
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    found = [route for route in found if not route.param_convertors] or found
    allowed = ", ".join(sorted({method for route in found for method in route.methods or ()}))
    message = f"method not allowed: {what} (allowed: {allowed})"
    return api_error(405, message, "method_not_allowed", headers={"Allow": allowed})
