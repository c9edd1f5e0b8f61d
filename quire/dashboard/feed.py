"""Frames for all viewers, from one poll of the engine while there are viewers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from quire.errors import InternalError, QuireError
from quire.utils.failures import explain

KEEP_ALIVE_SECONDS = 15.0
"""Interval of comments in a stream without news."""
KEEP_ALIVE = b": nothing new\n\n"

Poll = Callable[[], Awaitable[bytes]]
Pause = Callable[[float], Awaitable[None]]


class FeedClosedError(QuireError):
    """Error for a new viewer: the server shuts down."""


class Feed:
    """Frames for any number of viewers, each at its own rate.

    The feed polls at the fastest viewer's rate. Used on one event loop.
    """

    def __init__(self, poll: Poll, pause: Pause | None = None) -> None:
        """Feed of a server. poll: returns the newest frame (one line of JSON). pause: waits for some seconds, or until
        `close`."""
        self._poll = poll
        self._pause = pause or self._until_closed
        self._closing = asyncio.Event()
        self._intervals: dict[object, float] = {}
        """Seconds between frames, by viewer."""
        self._polling: asyncio.Task[None] | None = None
        self._frame: bytes | None = None
        self._number = 0
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    @property
    def num_viewers(self) -> int:
        return len(self._intervals)

    async def events(self, rate: float) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events, at most `rate` per second, the first at once, until the feed is closed.
        Raises FeedClosedError if it is already closed, and any error of `poll`.
        """
        if self._closing.is_set():
            raise FeedClosedError("the server is shutting down")
        viewer, interval, seen = object(), 1 / rate, 0
        self._join(viewer, interval)
        try:
            while not self._closing.is_set():
                if self._failure is not None:
                    raise self._failure
                if self._frame is not None and self._number > seen:
                    seen = self._number
                    yield b"data: %b\n\n" % self._frame
                    await self._pause(interval)
                elif not await self._hear():
                    yield KEEP_ALIVE
        finally:
            self._leave(viewer)

    def close(self) -> None:
        """End all streams at shutdown."""
        self._closing.set()
        self._stop()
        self._wake()

    def _join(self, viewer: object, interval: float) -> None:
        is_eager = interval < min(self._intervals.values(), default=float("inf"))
        self._intervals[viewer] = interval
        if is_eager or self._polling is None or self._polling.done():
            self._stop()
            self._failure = None
            self._polling = asyncio.ensure_future(self._keep_polling())

    def _leave(self, viewer: object) -> None:
        del self._intervals[viewer]
        if not self._intervals:
            self._stop()
            self._frame = None  # outdated by the time the next viewer comes

    def _stop(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            self._polling = None

    async def _keep_polling(self) -> None:
        try:
            while True:
                frame = await self._poll()
                if frame != self._frame:
                    self._frame = frame
                    self._number += 1
                    self._wake()
                await self._pause(min(self._intervals.values()))
        except asyncio.CancelledError:
            raise  # the last viewer has left
        except BaseException as error:  # otherwise viewers would wait forever
            if isinstance(error, Exception):
                self._failure = error
            else:
                self._failure = InternalError(f"no frame: {explain(error)}", summary="there is no frame to show")
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _hear(self) -> bool:
        try:
            async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                await self._news.wait()
            return True
        except TimeoutError:
            return False

    async def _until_closed(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()
