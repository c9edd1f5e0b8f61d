"""Checks of Host and Origin, which keep foreign web pages out.

The Host header reveals DNS rebinding; the Origin header a foreign page that posts.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import re
import socket
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.errors import ApiError, api_error, error_response, invalid_request, shorten

ANY = "*"
_ANY_HOST = "://*"
MAX_SHOWN_CHARACTERS = 100
_HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{0,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class HostRules:
    """Host names that a server on the address `bound_to` answers to. On a loopback address: `localhost`, names under
    it, and loopback addresses. Elsewhere also this machine's names and all addresses. Everywhere `allowed`."""

    def __init__(self, bound_to: str, allowed: Sequence[str]) -> None:
        self._bound_to = bound_to.lower()
        self._is_loopback = _is_loopback(self._bound_to)
        self._allows_any = ANY in allowed
        self._names = {name.lower() for name in allowed}
        self._suffixes = tuple(name[1:].lower() for name in allowed if name.startswith("*."))
        self._machine: frozenset[str] | None = None

    async def allow(self, name: str) -> bool:
        """True if the rules admit a host. name: Host header in lower case, without port, brackets and final dot."""
        if self._allows_any or name in self._names or name.endswith(self._suffixes) or _is_loopback(name):
            return True
        if self._is_loopback:
            return False
        if name == self._bound_to or _address(name) is not None:
            return True
        if self._machine is None:
            # Looked up here and not at the start, which a resolver that does not answer would delay.
            self._machine = await asyncio.to_thread(_machine_names)
        return name in self._machine


class OriginRules:
    """Allowed origins, and schemes allowed as a whole (`app://*`). pattern: regular expression of the latter, if
    any."""

    def __init__(self, allowed: Sequence[str]) -> None:
        schemes = [origin.removesuffix(_ANY_HOST) for origin in allowed if origin.endswith(_ANY_HOST)]
        self.origins = frozenset(origin for origin in allowed if not origin.endswith(_ANY_HOST))
        self.pattern = f"(?:{'|'.join(map(re.escape, schemes))})://.*" if schemes else None

    def allow(self, origin: str) -> bool:
        return (
            ANY in self.origins
            or origin in self.origins
            or (self.pattern is not None and re.fullmatch(self.pattern, origin) is not None)
        )


class SiteGuard:
    """Middleware that answers 421 to foreign names in Host, and 403 to pages of other sites outside `origins`."""

    def __init__(self, app: ASGIApp, hosts: HostRules, origins: Sequence[str]) -> None:
        self.app = app
        self._hosts = hosts
        self._origins = OriginRules(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := await self._objection(scope)) is not None:
            await error_response(error, scope)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _objection(self, scope: Scope) -> ApiError | None:
        host: str | None = None
        origins: list[str] = []
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1")
            elif name == b"origin":
                origins.append(value.decode("latin-1"))
        site: tuple[str, int] | None = None
        if host is not None:
            site = _site(host, scope["scheme"])
            if site is None:
                return invalid_request(f"the Host header is no host: {_shown(host)}", code="invalid_host")
            if not await self._hosts.allow(site[0]):
                message = f"this server does not answer to the host {_shown(site[0])}: --allowed-hosts adds names"
                return invalid_request(message, code="host_not_allowed", status=421)
        if not origins or ANY in self._origins.origins:
            return None
        if len(origins) == 1 and (self._origins.allow(origins[0]) or _is_same_site(origins[0], scope["scheme"], site)):
            return None
        message = f"pages of {_shown(', '.join(origins))} may not call this server: --cors-allowed-origins adds origins"
        return api_error(403, message, "origin_not_allowed")


class RootPath:
    """Middleware that strips `prefix` from paths, in case a proxy in front has not."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path == self._prefix or path.startswith(self._prefix + "/"):
            scope = {**scope, "path": path.removeprefix(self._prefix) or "/"}
        await self.app(scope, receive, send)


def _is_same_site(origin: str, scheme: str, site: tuple[str, int] | None) -> bool:
    origin_scheme, _, host = origin.partition("://")
    return site is not None and origin_scheme == scheme and _site(host, scheme) == site


def _site(host: str, scheme: str) -> tuple[str, int] | None:
    found = _HOST.fullmatch(host)
    if found is None:
        return None
    name = found["name"].lower().strip("[]").removesuffix(".")
    return name, int(found["port"] or _DEFAULT_PORTS.get(scheme, 0))


@functools.lru_cache(maxsize=64)
def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address is not None and address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _machine_names() -> frozenset[str]:
    return frozenset(name.lower() for name in (socket.gethostname(), socket.getfqdn()))


def _shown(text: str) -> str:
    return repr(shorten(text, MAX_SHOWN_CHARACTERS))
