"""The API key. Checked once the route is known, by the route's own mark: no spelling of a path gets around it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request

from quire.server.errors import INVALID_REQUEST, ApiError, ErrorDetail

_PUBLIC_MARK = "needs_no_key"

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def public(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that answers without a key. Every other one asks for it."""
    setattr(endpoint, _PUBLIC_MARK, True)
    return endpoint


def key_check(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    """Return the dependency of all routes: 401 unless the request brings `Authorization: Bearer <api_key>`.

    With no key set every request passes. Digests of equal length are compared in constant time.
    """
    expected = None if api_key is None else _digest(api_key.encode())

    async def check_key(request: Request) -> None:
        if expected is None or getattr(request.scope["endpoint"], _PUBLIC_MARK, False):
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Header values arrive decoded as Latin-1; the key may hold anything.
        if scheme.lower() == "bearer" and hmac.compare_digest(_digest(given.strip().encode("latin-1")), expected):
            return
        message = "incorrect API key" if given else "an API key is required: 'Authorization: Bearer KEY'"
        detail = ErrorDetail(message, INVALID_REQUEST, None, "invalid_api_key")
        raise ApiError(401, detail, {"WWW-Authenticate": "Bearer"})

    return check_key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
