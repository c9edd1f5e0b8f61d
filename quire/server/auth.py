"""The check of API keys and of who may control the engine, made once the route is known by the route's own mark; no
spelling of a path avoids it."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request

from quire.engine.request_part import CLIENT_NAME
from quire.server.errors import api_error
from quire.server.keys import Client, KeyRing
from quire.server.limits import CLIENT, OWNER
from quire.utils.fair_threads import CALLER

_PUBLIC_MARK = "needs_no_key"
_ADMIN_MARK = "controls_engine"
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
"""Headers by which a proxy says that it asks for someone else."""

SUBSCRIBER_BITS = 64
"""Bits of an IPv6 address that name a client's network."""

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def public(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that answers without a key. Every other one asks for it."""
    setattr(endpoint, _PUBLIC_MARK, True)
    return endpoint


def admin(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that controls the engine: it asks for an admin's key, and where there is none it answers only
    clients on this machine."""
    setattr(endpoint, _ADMIN_MARK, True)
    return endpoint


def key_check(keys: KeyRing, *, on_unix_socket: bool = False) -> Callable[[Request], Awaitable[None]]:
    """Return the dependency of all routes: 401 unless the request brings one of the keys as `Authorization: Bearer KEY`
    or `x-api-key: KEY`, or there are none; 403 where it must be an admin's and is not. `client_of` then says which
    client called. on_unix_socket: whether all clients are on this machine."""

    async def check_key(request: Request) -> None:
        endpoint = request.scope["endpoint"]
        if getattr(endpoint, _PUBLIC_MARK, False):
            return
        is_admins = getattr(endpoint, _ADMIN_MARK, False)
        client = None if is_admins and keys.has_admin_keys else keys.anyone
        if client is None:
            given = _given_key(request)
            # Header values arrive decoded as Latin-1; the key may hold anything.
            client = keys.find(given.encode("latin-1")) if given else None
            if client is None:
                message = (
                    "Incorrect API key provided" if given else "an API key is required: 'Authorization: Bearer KEY'"
                )
                raise api_error(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if is_admins:
            _check_admin(client, keys, is_local=on_unix_socket or _is_local(request))
        request.state.client = client
        CLIENT.set(client)
        CLIENT_NAME.set(client.name)
        OWNER.set(owner_of(request))
        CALLER.set(client.name or _network_of(request))

    return check_key


def _network_of(request: Request) -> str:
    """The address of a client without a key; of IPv6 the network that one subscriber has."""
    host = "" if request.client is None else request.client.host
    if ":" not in host:
        return host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address.packed, SUBSCRIBER_BITS), strict=False))
    return host


def _given_key(request: Request) -> str:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "").strip()


def _check_admin(client: Client, keys: KeyRing, *, is_local: bool) -> None:
    """Raise a 403 error for a client that may not control the engine."""
    if keys.has_admin_keys:
        if client.is_admin:
            return
        message = "this route asks for an admin's API key"
    else:
        if is_local:
            return
        message = "without an admin's API key (--admin-api-key) this route answers only clients on this machine"
    raise api_error(403, message, "not_an_admin")


def _is_local(request: Request) -> bool:
    """Whether a client on this machine asks for itself. A connection whose other end is unknown is not."""
    if request.client is None or any(name in request.headers for name in _FORWARDED):
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def owner_of(request: Request) -> str:
    """Who sent a request, by the key that it brought (a digest); clients without a key are one owner."""
    return hashlib.sha256(_given_key(request).encode("latin-1")).hexdigest()


def client_of(request: Request) -> Client:
    """The client that sent a request to a route that is not public."""
    client: Client = request.state.client
    return client
