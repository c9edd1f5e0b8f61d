from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quire.dashboard.frame import Frame
from quire.utils.server_connection import ServerConnection, ServerGoneError, error_message
from quire.utils.sse import EventParser

SECONDS_WITHOUT_A_BYTE = 30.0
"""Timeout without data: twice the interval of the server's signs of life."""
HINT = ": is it a Quire server of this version?"


class FrameClient:
    """Connection of `quire top` to a server. Every failure is a QuireError with one clear line."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._decoder = msgspec.json.Decoder(Frame)

    def frame(self) -> Frame:
        with self._connection.request("GET", "/debug/kv", hint=HINT) as response:
            return self._decoder.decode(response.read())

    def frames(self, rate: float) -> Iterator[Frame]:
        """Yield at most `rate` frames per second. Raises ServerGoneError when the server ends the stream."""
        parser, url = EventParser(), self._connection.url
        with self._connection.request("GET", f"/debug/kv/events?rate={rate:g}", hint=HINT) as response:
            for data in response.iter_raw():
                for event in parser.feed(data):
                    failure = error_message(event)
                    if failure is not None:
                        raise ServerGoneError(f"{url}: {failure}")
                    yield self._decoder.decode(event)
        raise ServerGoneError(f"{url} closed the connection")
