"""The check of API keys, made once the route is known by the route's own mark; no spelling of a path avoids it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request

from quire.server.errors import INVALID_REQUEST, ApiError, ErrorDetail
from quire.server.keys import Client, KeyRing

_PUBLIC_MARK = "needs_no_key"

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def public(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that answers without a key. Every other one asks for it."""
    setattr(endpoint, _PUBLIC_MARK, True)
    return endpoint


def key_check(keys: KeyRing) -> Callable[[Request], Awaitable[None]]:
    """Return the dependency of all routes: 401 unless the request brings `Authorization: Bearer KEY` with one of the
    keys, or there are none. `client_of` then says which client called."""

    async def check_key(request: Request) -> None:
        if getattr(request.scope["endpoint"], _PUBLIC_MARK, False):
            return
        client = keys.anyone
        if client is None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            # Header values arrive decoded as Latin-1; the key may hold anything.
            client = keys.find(given.strip().encode("latin-1")) if scheme.lower() == "bearer" else None
            if client is None:
                message = "incorrect API key" if given else "an API key is required: 'Authorization: Bearer KEY'"
                detail = ErrorDetail(message, INVALID_REQUEST, None, "invalid_api_key")
                raise ApiError(401, detail, {"WWW-Authenticate": "Bearer"})
        request.state.client = client

    return check_key


def client_of(request: Request) -> Client:
    """The client that sent a request to a route that is not public."""
    client: Client = request.state.client
    return client
