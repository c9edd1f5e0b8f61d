"""The feed alone: one poll for all, none without viewers, bounded rates, dropped frames, the end. No clock is read:
the test decides how long a pause lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from quire.dashboard import feed as feed_module
from quire.dashboard.feed import KEEP_ALIVE, Feed, FeedClosedError
from tests.fakes.panic import Panic


class Source:
    """Frames numbered as they are asked for, unless `same`."""

    def __init__(self) -> None:
        self.num_polls = 0
        self.same: bytes | None = None
        self.error: BaseException | None = None

    async def poll(self) -> bytes:
        await asyncio.sleep(0)
        self.num_polls += 1
        if self.error is not None:
            raise self.error
        return self.same or b"%d" % self.num_polls


class Pauses:
    """Pauses that last until the test lets time go by."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []
        self._now = 0.0

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now + seconds, future))
        await future

    async def advance(self, seconds: float) -> None:
        """Let time go by in steps of a twentieth of a second, and let every task that is due run."""
        for _ in range(round(seconds * 20)):
            self._now += 0.05
            due = [sleeper for sleeper in self._sleepers if sleeper[0] <= self._now + 1e-9]
            self._sleepers = [sleeper for sleeper in self._sleepers if sleeper not in due]
            for _, future in due:
                if not future.done():
                    future.set_result(None)
            await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Viewer:
    """Takes every event as soon as it comes."""

    def __init__(self, feed: Feed, rate: float) -> None:
        self.events: list[bytes] = []
        self.error: Exception | None = None
        self._stream = feed.events(rate)
        self._task = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        try:
            async for event in self._stream:
                self.events.append(event)
        except Exception as error:
            self.error = error

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._stream.aclose()

    @property
    def has_ended(self) -> bool:
        return self._task.done()


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


@pytest.fixture
async def feed(source: Source, pauses: Pauses) -> AsyncIterator[Feed]:
    feed = Feed(source.poll, pauses)
    yield feed
    feed.close()
    await settle()


async def test_without_a_viewer_nothing_is_asked(feed: Feed, source: Source, pauses: Pauses) -> None:
    await pauses.advance(5)
    assert source.num_polls == 0
    viewer = Viewer(feed, 4)
    await pauses.advance(1)
    assert source.num_polls > 0
    await viewer.leave()
    asked = source.num_polls
    await pauses.advance(5)
    assert (source.num_polls, feed.num_viewers) == (asked, 0)


async def test_one_poll_however_many_look(feed: Feed, source: Source, pauses: Pauses) -> None:
    viewers = [Viewer(feed, 4) for _ in range(20)]
    await settle()
    await pauses.advance(2)
    assert source.num_polls == 1 + 2 * 4
    for viewer in viewers:
        assert viewer.events == viewers[0].events
        assert len(viewer.events) == source.num_polls
    for viewer in viewers:
        await viewer.leave()


@pytest.mark.parametrize("rate", [1, 4, 10])
async def test_the_rate_is_a_bound(feed: Feed, source: Source, pauses: Pauses, rate: float) -> None:
    viewer = Viewer(feed, rate)
    await settle()
    assert viewer.events == [b"data: 1\n\n"], "the first at once"
    await pauses.advance(3)
    assert len(viewer.events) == 1 + 3 * rate
    await viewer.leave()


async def test_each_viewer_has_its_own_rate_and_gets_the_newest(feed: Feed, source: Source, pauses: Pauses) -> None:
    slow = Viewer(feed, 1)
    await settle()
    eager = Viewer(feed, 10)
    await settle()
    await pauses.advance(3)
    assert len(slow.events) == 4
    assert len(eager.events) >= 30
    assert int(slow.events[-1][6:]) >= source.num_polls - 1, "not the one that came after its last"
    await eager.leave()
    await slow.leave()


async def test_a_slow_reader_drops_frames(feed: Feed, source: Source, pauses: Pauses) -> None:
    stream = feed.events(10)
    assert await anext(stream) == b"data: 1\n\n"
    other = Viewer(feed, 10)
    await pauses.advance(2)  # the first viewer's connection takes nothing meanwhile
    waiting = asyncio.ensure_future(anext(stream))
    await settle()
    await pauses.advance(0.1)
    assert int((await waiting)[6:]) >= 20
    await other.leave()
    await stream.aclose()
    assert feed.num_viewers == 0


async def test_an_unchanged_frame_is_not_sent_again(feed: Feed, source: Source, pauses: Pauses) -> None:
    source.same = b"same"
    viewer = Viewer(feed, 4)
    await pauses.advance(2)
    assert viewer.events == [b"data: same\n\n"]
    assert source.num_polls > 4
    source.same = b"other"
    await pauses.advance(1)
    assert viewer.events == [b"data: same\n\n", b"data: other\n\n"]
    await viewer.leave()


async def test_silence_is_broken_by_a_comment(
    feed: Feed, source: Source, pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.same = b"same"
    stream = feed.events(4)
    assert await anext(stream) == b"data: same\n\n"
    monkeypatch.setattr(feed_module, "KEEP_ALIVE_SECONDS", 0.0)
    waiting = asyncio.ensure_future(anext(stream))
    await settle()
    await pauses.advance(0.3)
    assert await waiting == KEEP_ALIVE
    await stream.aclose()


async def test_a_viewer_that_returns_sees_no_old_frame(feed: Feed, source: Source, pauses: Pauses) -> None:
    first = Viewer(feed, 4)
    await settle()
    await first.leave()
    second = Viewer(feed, 4)
    await settle()
    assert second.events == [b"data: 2\n\n"]
    await second.leave()


@pytest.mark.parametrize(
    ("error", "message"), [(RuntimeError("the engine is gone"), "the engine is gone"), (Panic("x"), "Panic: x")]
)
async def test_a_failure_reaches_everybody_and_the_next_viewer_tries_again(
    feed: Feed, source: Source, pauses: Pauses, error: BaseException, message: str
) -> None:
    viewers = [Viewer(feed, 4) for _ in range(3)]
    await settle()
    source.error = error
    await pauses.advance(1)
    assert [message in str(viewer.error) for viewer in viewers] == [True] * 3
    assert feed.num_viewers == 0
    source.error = None
    viewer = Viewer(feed, 4)
    await settle()
    assert viewer.error is None
    assert viewer.events
    await viewer.leave()


async def test_close_ends_all_streams_and_admits_no_viewer(source: Source) -> None:
    """With the real pause, which the test does not wait for."""
    feed = Feed(source.poll)
    viewers = [Viewer(feed, rate) for rate in (0.1, 10)]
    while not all(viewer.events for viewer in viewers):
        await asyncio.sleep(0)
    feed.close()
    await settle()
    assert all(viewer.has_ended and viewer.error is None for viewer in viewers)
    assert feed.num_viewers == 0
    with pytest.raises(FeedClosedError):
        await anext(feed.events(4))
