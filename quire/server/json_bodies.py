"""Checks of request bodies: JSON only, and a limit on the total size in flight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.applications import Starlette
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.auth import Endpoint
from quire.server.connection import UPLOAD
from quire.server.errors import ApiError, error_response, invalid_request, unavailable

FREE_BODY_BYTES = 64 * 1024
"""Bytes of each body that do not count: small requests come in while large ones hang."""
RETRY_AFTER_SECONDS = 1
_ANY_TYPE_MARK = "takes_any_content_type"
_UPLOAD_MARK = "takes_uploads"
IN_FLIGHT = "quire.body_in_flight"
"""Entry of a request's scope with its _BodyInFlight."""


@contextlib.contextmanager
def in_flight(scope: Scope) -> Iterator[None]:
    """Keep counting a body's bytes against the limit of unprocessed bodies, though it has been read."""
    body: _BodyInFlight | None = scope.get(IN_FLIGHT)
    if body is not None:
        body.is_kept = True
    try:
        yield
    finally:
        if body is not None:
            body.release()


def any_type(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that reads bodies of any Content-Type as JSON, unless a page sends them (with an Origin)."""
    setattr(endpoint, _ANY_TYPE_MARK, True)
    return endpoint


def takes_upload(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that reads multipart/form-data in pieces, none of which stay in memory."""
    setattr(endpoint, _UPLOAD_MARK, True)
    return endpoint


class JsonBodies:
    """Middleware that answers 415 to bodies other than JSON, and 503 while too many bytes are in flight. Routes of
    `any_type` accept forms and `text/plain` only without an Origin. max_total_bytes: limit of unread bodies, without
    the first FREE_BODY_BYTES of each."""

    def __init__(self, app: ASGIApp, max_total_bytes: int) -> None:
        self.app = app
        self._max_total_bytes = max_total_bytes
        self.num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self.app(scope, receive, send)
        elif _is_upload(scope):
            scope[UPLOAD] = True
            await self.app(scope, receive, send)
        elif (error := _objection(scope)) is not None:
            await error_response(error, scope)(scope, receive, send)
        else:
            body = scope[IN_FLIGHT] = _BodyInFlight(self, receive)
            try:
                await self.app(scope, body.receive, send)
            finally:
                body.release()

    def take(self, num_bytes: int) -> None:
        """Count received bytes. Raises ApiError (503) beyond the limit."""
        if self.num_bytes + num_bytes > self._max_total_bytes:
            error = unavailable(
                f"the server is receiving as many bytes of request bodies as it may ({self._max_total_bytes}, "
                "--max-total-body-size)"
            )
            error.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
            raise error
        self.num_bytes += num_bytes


class _BodyInFlight:
    def __init__(self, bodies: JsonBodies, receive: Receive) -> None:
        self._bodies = bodies
        self._receive = receive
        self._num_bytes = 0
        self._num_taken = 0
        self._is_complete = False
        self.is_kept = False

    async def receive(self) -> Message:
        if self._is_complete:
            if not self.is_kept:
                self.release()
            return await self._receive()
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if (num_new := self._num_bytes - FREE_BODY_BYTES - self._num_taken) > 0:
            self._bodies.take(num_new)
            self._num_taken += num_new
        self._is_complete = not message.get("more_body", False)
        return message

    def release(self) -> None:
        self._bodies.num_bytes -= self._num_taken
        self._num_bytes = self._num_taken = 0


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 \t"))
        for name, value in scope["headers"]
    )


def _is_upload(scope: Scope) -> bool:
    """True for a form to a route that takes uploads. SiteGuard has refused forms of foreign pages."""
    types = [value for name, value in scope["headers"] if name == b"content-type"]
    if len(types) != 1 or types[0].partition(b";")[0].strip().lower() != b"multipart/form-data" or "app" not in scope:
        return False
    if any(name == b"content-encoding" for name, _ in scope["headers"]):
        return False
    found = [route for route in scope["app"].routes if route.matches(scope)[0] is Match.FULL]
    return bool(found) and getattr(getattr(found[0], "endpoint", None), _UPLOAD_MARK, False)


def _objection(scope: Scope) -> ApiError | None:
    types = [value.decode("latin-1") for name, value in scope["headers"] if name == b"content-type"]
    is_json = len(types) == 1 and _is_json(types[0])
    is_compressed = any(
        name == b"content-encoding" and value.strip().lower() != b"identity" for name, value in scope["headers"]
    )
    if is_json and not is_compressed:
        return None  # saves a search of the many routes
    app: Starlette | None = scope.get("app")
    found = [] if app is None else [route for route in app.routes if route.matches(scope)[0] is not Match.NONE]
    if app is not None and not found:
        return None  # no route reads the body: the answer is 404
    takes_any = any(getattr(getattr(route, "endpoint", None), _ANY_TYPE_MARK, False) for route in found)
    is_page = any(name == b"origin" for name, _ in scope["headers"])
    if not is_json and not (takes_any and not is_page):
        message = "a request body must be JSON, with the header 'Content-Type: application/json'"
    elif is_compressed:
        message = "a request body must not be compressed (Content-Encoding)"
    else:
        return None
    return invalid_request(message, code="unsupported_media_type", status=415)


def _is_json(content_type: str) -> bool:
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        return False
    charsets = [value.strip(' "') for name, _, value in (p.partition("=") for p in parameters) if name == "charset"]
    return all(charset in ("utf-8", "utf8", "us-ascii") for charset in charsets)
