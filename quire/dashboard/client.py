"""Frames of a server elsewhere: one, or as they come."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import msgspec

from quire.dashboard.frame import Frame
from quire.errors import QuireError, UserError
from quire.utils.sse import EventParser

SECONDS_WITHOUT_A_BYTE = 30.0
"""Twice what passes between two signs of life of a server where nothing happens."""


class ServerGoneError(QuireError):
    """The connection to the server ended."""


class FrameClient:
    """Asks one server. Every failure is a QuireError with one clear line."""

    def __init__(self, url: str, api_key: str | None, *, cacert: str | None = None, is_insecure: bool = False) -> None:
        """cacert: a file of authorities, in place of the usual ones. is_insecure: any certificate will do. Raises
        UserError when `url` is no http address, or `cacert` no such file."""
        self._url = url.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise UserError(f"{url!r} is no address of a server, such as http://127.0.0.1:8000", param="url")
        headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        verify: ssl.SSLContext | bool = not is_insecure
        if cacert is not None and not is_insecure:
            try:
                verify = ssl.create_default_context(cafile=cacert)
            except OSError as error:
                raise UserError(f"cacert: {cacert!r} is no file of certificates: {error}", param="cacert") from None
        self._client = httpx.Client(headers=headers, timeout=SECONDS_WITHOUT_A_BYTE, trust_env=False, verify=verify)
        self._decoder = msgspec.json.Decoder(Frame)

    def close(self) -> None:
        self._client.close()

    def frame(self) -> Frame:
        """One look."""
        with self._failing(), self._client.stream("GET", f"{self._url}/debug/kv") as response:
            self._check(response)
            return self._decoder.decode(response.read())

    def frames(self, rate: float) -> Iterator[Frame]:
        """At most `rate` a second, until the server ends the stream: then ServerGoneError is raised."""
        url = f"{self._url}/debug/kv/events?rate={rate:g}"
        parser = EventParser()
        with self._failing(), self._client.stream("GET", url) as response:
            self._check(response)
            for data in response.iter_raw():
                for event in parser.feed(data):
                    yield self._decode_event(event)
        raise ServerGoneError(f"{self._url} closed the connection")

    def _decode_event(self, event: bytes) -> Frame:
        failure = _message(event)
        if failure is not None:
            raise ServerGoneError(f"{self._url}: {failure}")
        return self._decoder.decode(event)

    def _check(self, response: httpx.Response) -> None:
        if response.status_code == 200:
            return
        message = _message(response.read()) or response.reason_phrase
        hint = ": is it a Quire server of this version?" if response.status_code == 404 else ""
        kind = UserError if response.status_code < 500 else ServerGoneError
        raise kind(f"{self._url} answers {response.status_code}: {message}{hint}")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ServerGoneError(f"cannot reach {self._url}: {reason}") from None
        except msgspec.MsgspecError as error:
            raise ServerGoneError(f"{self._url} sent something else than a frame: {error}") from None


class _Detail(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Detail


def _message(body: bytes) -> str | None:
    """The message of an OpenAI error body; None when it is none."""
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
