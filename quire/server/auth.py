"""Check of API keys and admin rights, after routing."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from fastapi import Request

from quire.engine.request_part import CLIENT_NAME, IN_BACKGROUND
from quire.server.errors import api_error
from quire.server.keys import Client, KeyRing
from quire.server.limits import CLIENT, OWNER
from quire.utils.fair_threads import CALLER

_PUBLIC_MARK = "needs_no_key"
_ADMIN_MARK = "controls_engine"
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
"""Headers in which a proxy names the client it forwards for."""

LINE_OWNER = "quire.line_owner"
"""Entry of a request's scope with its LineOwner, if the server itself asks it."""

SUBSCRIBER_BITS = 64
"""Prefix length of an IPv6 client's network, in bits."""

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class LineOwner(NamedTuple):
    """Client whose batch a request is a line of. owner: see `owner_of`; empty without a key."""

    client: Client
    owner: str


def public(endpoint: Endpoint) -> Endpoint:
    """Decorator: mark an endpoint that needs no API key."""
    setattr(endpoint, _PUBLIC_MARK, True)
    return endpoint


def admin(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that controls the engine. It needs an admin's key or, if the server has none, a client on this
    machine."""
    setattr(endpoint, _ADMIN_MARK, True)
    return endpoint


def has_admin_key(request: Request) -> bool:
    """True if the request brings an admin's key, whether or not its route needs one."""
    client = _client_with_key(_given_key(request), request.state.keys)
    return client is not None and client.is_admin


def key_check(keys: KeyRing, *, on_unix_socket: bool = False) -> Callable[[Request], Awaitable[None]]:
    """Dependency of all routes that sets `client_of`. Raises 401 unless the request brings a known key (`Authorization:
    Bearer KEY` or `x-api-key: KEY`) or none is configured; 403 without a needed admin's key. on_unix_socket: all
    clients are on this machine."""

    async def check_key(request: Request) -> None:
        endpoint = request.scope["endpoint"]
        if getattr(endpoint, _PUBLIC_MARK, False):
            return
        if (line := request.scope.get(LINE_OWNER)) is not None:
            _enter_line(request, line)
            return
        is_admins = getattr(endpoint, _ADMIN_MARK, False)
        client = None if is_admins and keys.has_admin_keys else keys.anyone
        if client is None:
            given = _given_key(request)
            client = _client_with_key(given, keys)
            if client is None:
                message = (
                    "Incorrect API key provided" if given else "an API key is required: 'Authorization: Bearer KEY'"
                )
                raise api_error(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if is_admins:
            _check_admin(client, keys, is_local=on_unix_socket or _is_local(request))
        request.state.client, request.state.keys = client, keys
        CLIENT.set(client)
        CLIENT_NAME.set(client.name)
        OWNER.set(owner_of(request))
        CALLER.set(client.name or _network_of(request))

    return check_key


def _enter_line(request: Request, line: LineOwner) -> None:
    request.state.client = line.client
    CLIENT.set(line.client)
    CLIENT_NAME.set(line.client.name)
    OWNER.set(owner_of(request))
    CALLER.set(f"batches of {line.client.name}")  # takes turns with the client's other requests
    IN_BACKGROUND.set(True)


def _network_of(request: Request) -> str:
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


def _client_with_key(given: str, keys: KeyRing) -> Client | None:
    # Header values arrive decoded as Latin-1; the key may hold anything.
    return keys.find(given.encode("latin-1")) if given else None


def _check_admin(client: Client, keys: KeyRing, *, is_local: bool) -> None:
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
    if request.client is None or any(name in request.headers for name in _FORWARDED):
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def owner_of(request: Request) -> str:
    """Digest of the request's key, for a line of a batch its client's. Clients without a key share one."""
    line = request.scope.get(LINE_OWNER)
    if line is not None and line.owner:
        return str(line.owner)
    return hashlib.sha256(_given_key(request).encode("latin-1")).hexdigest()


def client_of(request: Request) -> Client:
    client: Client = request.state.client
    return client
