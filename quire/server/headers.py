from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.body import IGNORED_FIELDS

MAX_NAME_CHARACTERS = 64
MAX_HEADER_CHARACTERS = 1024
REQUEST_ID = b"x-request-id"
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_SAFE_ID = re.compile(rb"[!-~]{1,128}")

Headers = Iterable[tuple[bytes, bytes]]


class ReportHeaders:
    """Middleware that adds `x-quire-ignored` and X-Request-Id to responses. request_ids: return the request's
    X-Request-Id, or a new one."""

    def __init__(self, app: ASGIApp, request_ids: bool) -> None:
        self.app = app
        self._request_ids = request_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def report(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message["headers"]
                if names := scope.get(IGNORED_FIELDS):
                    headers = [*headers, (b"x-quire-ignored", header_value(names).encode())]
                if self._request_ids:
                    headers = _with_request_id(headers, scope["headers"])
                message["headers"] = headers
            await send(message)

        await self.app(scope, receive, report)


def _with_request_id(headers: Headers, request_headers: Headers) -> Headers:
    given = next((value for name, value in request_headers if name == REQUEST_ID), b"")
    own = next((value for name, value in headers if name.lower() == REQUEST_ID), b"")
    returned = given if _SAFE_ID.fullmatch(given) else own or uuid.uuid4().hex.encode()
    return [*(pair for pair in headers if pair[0].lower() != REQUEST_ID), (REQUEST_ID, returned)]


def header_value(names: Sequence[str]) -> str:
    """Join the names, made safe for a header. `...` stands for those beyond the limit."""
    value = ""
    for name in names:
        shown = _UNSAFE.sub("?", name[:MAX_NAME_CHARACTERS])
        if len(value) + len(shown) > MAX_HEADER_CHARACTERS:
            return f"{value}, ..."
        value = f"{value}, {shown}" if value else shown
    return value
