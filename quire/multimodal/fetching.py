"""Images by URL: files of one directory, and hosts named in the engine's options.

Each address is checked before the connection to it (DNS rebinding). Redirects are errors.
"""

from __future__ import annotations

import errno
import http.client
import ipaddress
import os
import socket
import ssl
import stat
import time
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from quire.config.media import MediaConfig
from quire.errors import UserError
from quire.multimodal.sources import DEFAULT_LIMITS, ImageLimits, too_many_bytes

_PORTS = {"http": 80, "https": 443}
_PIECE = 2**16
_USER_AGENT = "quire"


def fetch_image(url: str, where: str, media: MediaConfig, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
    """Bytes of the image or video at a URL. Waits for the network. Raises UserError, without the other side's text."""
    name, kind = limits.name, limits.kind
    if any(each.isspace() or each == "\\" or not each.isprintable() for each in url):
        raise UserError(f"{where}: a URL of {name} has no spaces, control characters and backslashes", param=where)
    try:
        parsed = urlsplit(url)
        port = parsed.port
    except ValueError:
        raise UserError(f"{where}: the {kind}'s URL is not valid", param=where) from None
    if parsed.scheme == "file":
        return _read_file(parsed, where, media, limits)
    if parsed.scheme not in _PORTS:
        raise UserError(
            f"{where}: a URL of {name} must be data:{kind}/...;base64,... (http, https and file URLs only where "
            f"the server allows them), not {parsed.scheme!r:.20}",
            param=where,
        )
    host = (parsed.hostname or "").rstrip(".")
    if host not in media.domains:
        raise UserError(
            f"{where}: {kind}s of {host!r:.100} are not fetched: the server's allowed_media_domains do not name it",
            param=where,
        )
    if parsed.username is not None or parsed.password is not None:
        raise UserError(f"{where}: a URL of {name} must not have a user or a password", param=where)
    return _Fetch(parsed, host, port or _PORTS[parsed.scheme], where, limits).run(media)


def _read_file(parsed: SplitResult, where: str, media: MediaConfig, limits: ImageLimits) -> bytes:
    if media.local_path is None:
        raise UserError(f"{where}: files are not read: the server has no allowed_local_media_path", param=where)
    if parsed.netloc not in ("", "localhost") or parsed.query or parsed.fragment:
        raise UserError(f"{where}: a file URL is file:///path", param=where)
    failure = UserError(f"{where}: no file below allowed_local_media_path has this path", param=where)
    try:
        path = Path(unquote(parsed.path)).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise failure from None
    if not path.is_relative_to(media.local_path):
        raise failure
    try:
        # The file may have been replaced since it was resolved: follow no link, and do not wait for a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        raise failure from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise failure
    with open(descriptor, "rb") as file:
        if found.st_size > limits.max_bytes:
            raise too_many_bytes(where, found.st_size, limits)
        return file.read(limits.max_bytes)


class _Fetch:
    def __init__(self, parsed: SplitResult, host: str, port: int, where: str, limits: ImageLimits) -> None:
        self._parsed, self._host, self._port = parsed, host, port
        self._where, self._limits = where, limits
        self._end = time.monotonic() + limits.fetch_seconds

    def run(self, media: MediaConfig) -> bytes:
        try:
            connection = self._connect(self._addresses(media))
            try:
                return self._answer(connection)
            finally:
                connection.close()
        except UserError:  # which is a ValueError
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            kind = "took too long" if isinstance(error, TimeoutError) else "failed"
            raise self._error(f"the connection to {self._host!r:.100} {kind}") from None

    def _error(self, what: str) -> UserError:
        return UserError(f"{self._where}: the {self._limits.kind} was not fetched: {what}", param=self._where)

    def _seconds(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _addresses(self, media: MediaConfig) -> list[str]:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise self._error(f"{self._host!r:.100} has no address") from None
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        for text in addresses:
            address = ipaddress.ip_address(text.partition("%")[0])
            mapped = getattr(address, "ipv4_mapped", None) or address
            is_listed = any(mapped.version == each.version and mapped in each for each in media.networks)
            is_public = mapped.is_global and not mapped.is_multicast
            if not is_public and not is_listed:
                raise self._error(
                    f"{self._host!r:.100} has an address that is not public, and that allowed_media_domains do not name"
                )
        return addresses

    def _connect(self, addresses: list[str]) -> http.client.HTTPConnection:
        last: OSError = OSError(errno.EHOSTUNREACH, "no address")
        for address in addresses:
            try:
                found = socket.create_connection((address, self._port), self._seconds())
            except OSError as error:
                last = error
                continue
            try:
                if self._parsed.scheme == "https":
                    found.settimeout(self._seconds())
                    found = ssl.create_default_context().wrap_socket(found, server_hostname=self._host)
            except BaseException:
                found.close()
                raise
            connection = http.client.HTTPConnection(self._host, self._port)
            connection.sock = found
            return connection
        raise last

    def _answer(self, connection: http.client.HTTPConnection) -> bytes:
        path = (self._parsed.path or "/") + (f"?{self._parsed.query}" if self._parsed.query else "")
        self._limit_wait(connection)
        connection.request(
            "GET", path, headers={"User-Agent": _USER_AGENT, "Accept": f"{self._limits.kind}/*, */*;q=0.5"}
        )
        response = connection.getresponse()
        if response.status != http.client.OK:
            what = "a redirect, which is not followed" if 300 <= response.status < 400 else f"status {response.status}"
            raise self._error(f"{self._host!r:.100} answered with {what}")
        if response.length is not None and response.length > self._limits.max_bytes:
            raise too_many_bytes(self._where, response.length, self._limits)
        parts: list[bytes] = []
        size = 0
        while True:
            self._limit_wait(connection)
            part = response.read1(_PIECE)
            if not part:
                break
            parts.append(part)
            size += len(part)
            if size > self._limits.max_bytes:
                raise too_many_bytes(self._where, size, self._limits)
        if response.length:
            raise self._error(f"the answer of {self._host!r:.100} was cut off")
        return b"".join(parts)

    def _limit_wait(self, connection: http.client.HTTPConnection) -> None:
        seconds = self._seconds()
        if connection.sock is not None:
            connection.sock.settimeout(seconds)
