"""HTTP connection from the terminal to a server, with a clear line for each failure."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec

from quire.errors import QuireError, UserError


class ServerGoneError(QuireError):
    """The server ended the connection, cannot be reached, or sent no valid answer."""


class ServerConnection:
    """Client of one server. Every failure is a QuireError of one line."""

    def __init__(
        self, url: str, api_key: str | None, *, timeout: float, cacert: str | None = None, is_insecure: bool = False
    ) -> None:
        """timeout: seconds without a byte after which the server counts as gone. cacert: file of authorities that
        replace the usual ones. is_insecure: accept any certificate. Raises UserError if `url` is no http address, or
        `cacert` no such file."""
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"{url!r} is no address of a server, such as http://127.0.0.1:8000", param="url")
        headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        verify: ssl.SSLContext | bool = not is_insecure
        if cacert is not None and not is_insecure:
            try:
                verify = ssl.create_default_context(cafile=cacert)
            except OSError as error:
                raise UserError(f"cacert: {cacert!r} is no file of certificates: {error}", param="cacert") from None
        self._client = httpx.Client(headers=headers, timeout=timeout, trust_env=False, verify=verify)

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def request(self, method: str, path: str, *, body: Any = None, hint: str = "") -> Iterator[httpx.Response]:
        """Open response of a request, with its body unread. body: sent as JSON. hint: probable meaning of a 404. Raises
        UserError for a refusal by the server, ServerGoneError for other failures."""
        try:
            with self._client.stream(method, self.url + path, json=body) as response:
                if response.status_code != 200:
                    message = error_message(response.read()) or response.reason_phrase
                    kind = UserError if response.status_code < 500 else ServerGoneError
                    more = hint if response.status_code == 404 else ""
                    raise kind(f"{self.url} answers {response.status_code}: {message}{more}")
                yield response
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ServerGoneError(f"cannot reach {self.url}: {reason}") from None
        except msgspec.MsgspecError as error:
            raise ServerGoneError(f"{self.url} sent something else than asked for: {error}") from None


class _Detail(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Detail


def error_message(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
