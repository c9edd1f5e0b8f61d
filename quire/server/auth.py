"""The API key: a dependency of the routes themselves, so that no spelling of a path gets around it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable

from fastapi import Request

from quire.server.errors import INVALID_REQUEST, ApiError, ErrorDetail


def key_check(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    """Return a dependency that raises 401 unless the request brings `Authorization: Bearer <api_key>`.

    With no key set every request passes. Digests of equal length are compared in constant time.
    """
    expected = None if api_key is None else _digest(api_key)

    async def check_key(request: Request) -> None:
        if expected is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(_digest(given.strip()), expected):
            return
        message = "incorrect API key" if given else "an API key is required: 'Authorization: Bearer KEY'"
        detail = ErrorDetail(message, INVALID_REQUEST, None, "invalid_api_key")
        raise ApiError(401, detail, {"WWW-Authenticate": "Bearer"})

    return check_key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
