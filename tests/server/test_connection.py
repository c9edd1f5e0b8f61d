"""What one connection may send, hold and take: heads, trailers, pipelines, upgrades, time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.server.connection import (
    LINGER_SECONDS,
    MAX_DISCARDED_BYTES,
    MAX_NUM_PIPELINED,
    MAX_NUM_SURPLUS,
    MAX_PIPELINED_BYTES,
    MIN_READ_BYTES,
    MIN_UPLOADED_BYTES,
    UPLOAD,
    Phase,
)
from quire.server.settings import ServerSettings
from tests.server.raw import STATUS_LINE, RawServer, raw_server, statuses

MAX_HEAD_BYTES, MAX_NUM_HEADERS = ServerSettings().max_head_bytes, ServerSettings().max_num_headers
GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
CHUNKED = b"POST /b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


@pytest.fixture
async def raw() -> AsyncIterator[RawServer]:
    async with raw_server() as server:
        yield server


def post(path: str, body: bytes, headers: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%b\r\n%b" % (path.encode(), len(body), headers, body)


def error_in(answer: bytes) -> str:
    """The message of the last answer, after checking its form."""
    *_, last = STATUS_LINE.finditer(answer)
    head, _, body = answer[last.start() :].partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"content-type: application/json" in head
    assert int(re.findall(rb"content-length: (\d+)", head)[0]) == len(body)
    assert len(body) < 500
    return json.loads(body)["error"]["message"]


async def flood(raw: RawServer, start: bytes, piece: bytes, limit: int) -> tuple[bytes, int]:
    """Send `start`, then `piece` again and again, `limit` bytes at most.

    Returns what came back, and how many bytes were sent before the server hung up.
    """
    return await flood_on(*await raw.open(start), piece, limit)


async def flood_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, piece: bytes, limit: int
) -> tuple[bytes, int]:
    num_sent = 0
    answer = asyncio.ensure_future(reader.read())
    with contextlib.suppress(ConnectionError):
        while num_sent < limit and not answer.done():
            writer.write(piece)
            num_sent += len(piece)
            await writer.drain()
            await asyncio.sleep(0)
    writer.close()
    try:
        return await answer, num_sent
    except ConnectionError:
        return b"", num_sent


class TestHeads:
    @pytest.mark.parametrize("start", [b"GET /a HTTP/1.1\r\nhost: x\r\n", b"GET /"])
    async def test_without_end(self, raw: RawServer, start: bytes) -> None:
        answer, _ = await flood(raw, start, (b"x: %b\r\n" if start.endswith(b"\n") else b"%b") % (b"y" * 4000), 2**20)
        assert statuses(answer) == [431]
        assert str(MAX_HEAD_BYTES) in error_in(answer)
        assert raw.app.seen == []

    async def test_too_many_headers(self, raw: RawServer) -> None:
        headers = b"a: b\r\n" * (MAX_NUM_HEADERS - 2)
        answer = await raw.exchange(b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + headers + b"\r\n")
        assert statuses(answer) == [200]
        answer = await raw.exchange(b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\na: b\r\n" + headers + b"\r\n")
        assert statuses(answer) == [431]
        assert str(MAX_NUM_HEADERS) in error_in(answer)

    @pytest.mark.parametrize("piece", [b"x1: y\r\n" * 1000, b"x" * 7000])
    async def test_trailers_without_end(self, raw: RawServer, piece: bytes) -> None:
        answer, num_sent = await flood(raw, CHUNKED + b"1\r\nx\r\n0\r\n", piece, 64 * 2**20)
        assert num_sent < 64 * 2**20, "the server hung up"
        assert statuses(answer) == [431]
        await raw.until_idle()

    @pytest.mark.parametrize("piece", [b"x1: y\r\n" * 1000, b"x" * 7000])
    async def test_trailers_without_end_behind_an_answer(self, raw: RawServer, piece: bytes) -> None:
        """Which did not wait for the body, such as a 401."""
        reader, writer = await raw.open(CHUNKED.replace(b"/b", b"/unread"))
        assert statuses(await reader.readuntil(b";")) == [200]
        writer.write(b"1\r\nx\r\n0\r\n")
        _, num_sent = await flood_on(reader, writer, piece, 64 * 2**20)
        assert num_sent < 64 * 2**20
        await raw.until_idle()

    async def test_trailers_are_no_headers(self, raw: RawServer) -> None:
        answer = await raw.exchange(CHUNKED + b"1\r\nx\r\n0\r\nhost: evil\r\nauthorization: z\r\n\r\n" + LAST)
        assert statuses(answer) == [200, 200]
        assert {name for name, _ in raw.app.headers} == {b"host", b"connection"}

    async def test_small_chunks_cost_nothing(self, raw: RawServer) -> None:
        num_chunks = MAX_HEAD_BYTES
        answer = await raw.exchange(CHUNKED + b"1\r\nx\r\n" * num_chunks + b"0\r\n\r\n" + LAST)
        assert statuses(answer) == [200, 200]
        assert raw.app.seen[0] == ("/b", b"x" * num_chunks)

    async def test_chunk_extensions_count(self, raw: RawServer) -> None:
        answer, num_sent = await flood(raw, CHUNKED, b"1;%b\r\nx\r\n" % (b"e" * 1000), 64 * 2**20)
        assert num_sent < 64 * 2**20
        assert statuses(answer) == [431]


class TestForms:
    """What another program could read differently is refused, and nothing behind it is read."""

    @pytest.mark.parametrize(
        "head",
        [
            b"GET /a HTTP/1.1\r\n\r\n",
            b"GET /a HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n",
            b"GET /a HTTP/1.0\r\nhost: a\r\nHost: b\r\n\r\n",
            b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\nx",
            b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 1, 1\r\n\r\nx",
            b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: +1\r\n\r\nx",
            b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\nx",
            b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 0x1\r\n\r\nx",
            b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999\r\n\r\nx",
            b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 1\r\n\r\n0\r\n\r\n",
            b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
            b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
            b"POST /a HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            b"GET /a HTTP/1.1\r\nhost : a\r\n\r\n",
            b"GET /a HTTP/1.1\r\nhost: a\r\n b: c\r\n\r\n",
            b"GET /a HTTP/1.1\nhost: a\n\n",
            b"GET /a HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n",
            b"GET /a b HTTP/1.1\r\nhost: a\r\n\r\n",
            b"GET a HTTP/1.1\r\nhost: a\r\n\r\n",
            b"GET * HTTP/1.1\r\nhost: a\r\n\r\n",
            b"GET http://evil/a HTTP/1.1\r\nhost: a\r\n\r\n",
            b"GET http://u@a/a HTTP/1.1\r\nhost: a\r\n\r\n",
            b"GET http://a HTTP/1.1\r\nhost: a\r\n\r\n",
            b"GET file://a/a HTTP/1.1\r\nhost: a\r\n\r\n",
            b"GET /a HTTP/1.2\r\nhost: a\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01",
        ],
    )
    async def test_is_400(self, raw: RawServer, head: bytes) -> None:
        answer = await raw.exchange(head + LAST)
        assert statuses(answer) == [400]
        assert "not valid HTTP" in error_in(answer)
        assert raw.app.seen == []

    @pytest.mark.parametrize(
        ("head", "status"),
        [
            (b"GET /a HTTP/2.0\r\nhost: a\r\n\r\n", 505),
            (b"CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n", 501),
        ],
    )
    async def test_what_is_not_served(self, raw: RawServer, head: bytes, status: int) -> None:
        answer = await raw.exchange(head + LAST)
        assert statuses(answer) == [status]
        assert error_in(answer)
        assert raw.app.seen == []

    async def test_bad_chunks(self, raw: RawServer) -> None:
        for chunk in (b"g\r\n", b"-1\r\n", b"1\r\nxx", b"ffffffffffffffffff\r\n", b"1\nx\n"):
            answer = await raw.exchange(CHUNKED + chunk + LAST)
            assert statuses(answer) == [400]
        await raw.until_idle()
        assert raw.app.seen == []
        assert raw.app.num_hang_ups == 5, "the application is told that no more comes"

    @pytest.mark.parametrize(
        "head",
        [
            b"GET http://X:80/a HTTP/1.1\r\nhost: x:80\r\nconnection: close\r\n\r\n",
            b"GET /a HTTP/1.0\r\n\r\n",
            b"\r\n\r\nGET /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        ],
    )
    async def test_other_forms_that_are_served(self, raw: RawServer, head: bytes) -> None:
        assert statuses(await raw.exchange(head)) == [200]
        assert raw.app.seen == [("/a", b"")]

    async def test_nothing_is_written_into_the_answer_before(self, raw: RawServer) -> None:
        reader, writer = await raw.open(post("/wait", b"x") + b"\x00garbage")
        await raw.until(lambda: raw.app.seen)
        raw.app.release.set()
        answer = await reader.read()
        writer.close()
        assert statuses(answer) == [200]
        assert answer.endswith(b"/wait:x;")


class TestUpgrade:
    """An upgrade is ignored, and the request answered as if it had not asked for one."""

    async def test_a_body_is_kept(self, raw: RawServer) -> None:
        answer = await raw.exchange(post("/b", b'{"prompt": "a"}', UPGRADE) + LAST)
        assert statuses(answer) == [200, 200]
        assert raw.app.seen == [("/b", b'{"prompt": "a"}'), ("/last", b"")]

    async def test_byte_by_byte(self, raw: RawServer) -> None:
        reader, writer = await raw.open()
        for byte in post("/b", b"body", UPGRADE) + LAST:
            writer.write(bytes([byte]))
            await writer.drain()
        assert statuses(await reader.read()) == [200, 200]
        writer.close()
        assert raw.app.seen == [("/b", b"body"), ("/last", b"")]

    async def test_chunked(self, raw: RawServer) -> None:
        head = CHUNKED[:-2] + UPGRADE + b"\r\n"
        answer = await raw.exchange(head + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n" + LAST)
        assert statuses(answer) == [200, 200]
        assert raw.app.seen == [("/b", b"abc"), ("/last", b"")]

    async def test_without_a_body_and_pipelined(self, raw: RawServer) -> None:
        request = b"GET /a HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"\r\n"
        websocket = b"GET /w HTTP/1.1\r\nhost: x\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n\r\n"
        answer = await raw.exchange(request * 3 + websocket + LAST)
        assert statuses(answer) == [200] * 5
        assert [path for path, _ in raw.app.seen] == ["/a", "/a", "/a", "/w", "/last"]

    async def test_smuggled(self, raw: RawServer) -> None:
        answer = await raw.exchange(b"POST /a HTTP/1.1\r\n" + UPGRADE + b"content-length: 5\r\n\r\nhello" + LAST)
        assert statuses(answer) == [400]


class TestPipelines:
    @pytest.mark.parametrize("behind", [b"", GET, GET[:9], post("/b", b"x" * 100)[:-9], GET * 3, b"\r\n" * 9])
    async def test_a_hang_up_is_seen_behind_them(self, raw: RawServer, behind: bytes) -> None:
        _, writer = await raw.open(post("/wait", b"") + behind)
        await raw.until(lambda: raw.app.seen)
        writer.close()
        await raw.until_idle()
        assert raw.app.num_hang_ups == 1
        assert raw.app.seen == [("/wait", b"")], "what came behind was not begun"

    async def test_a_hang_up_is_seen_behind_one_that_comes_later(self, raw: RawServer) -> None:
        _, writer = await raw.open(post("/wait", b""))
        await raw.until(lambda: raw.app.seen)
        writer.write(GET)
        await raw.until(lambda: raw.connections[0].pipeline)
        writer.close()
        await raw.until_idle()
        assert raw.app.num_hang_ups == 1

    async def test_answers_come_in_order(self, raw: RawServer) -> None:
        requests = b"".join(post(f"/{number}", b"%d" % number) for number in range(MAX_NUM_PIPELINED))
        answer = await raw.exchange(requests + LAST)
        expected = [f"/{number}" for number in range(MAX_NUM_PIPELINED)] + ["/last"]
        assert [path for path, _ in raw.app.seen] == expected
        assert statuses(answer) == [200] * len(expected)

    @pytest.mark.parametrize(
        ("behind", "num_more"),
        [
            (GET * 1000, MAX_NUM_PIPELINED),
            (post("/b", b"x" * (2 * MAX_PIPELINED_BYTES)), 0),
            (CHUNKED + b"1000\r\n%b\r\n" % (b"x" * 4096) * 100, 0),
            (b"\r\n" * MAX_PIPELINED_BYTES * 4, 0),
        ],
    )
    async def test_too_much_ends_the_connection_behind_the_answer(
        self, raw: RawServer, behind: bytes, num_more: int
    ) -> None:
        reader, writer = await raw.open(post("/wait", b"x"))
        await raw.until(lambda: raw.app.seen)
        writer.write(behind)
        await writer.drain()
        [connection] = raw.connections
        await raw.until(lambda: connection._is_deaf)
        held = sum(len(cycle.body) for cycle, _ in connection.pipeline)
        assert held <= MAX_PIPELINED_BYTES
        assert len(connection.pipeline) == num_more
        raw.app.release.set()
        answer = await reader.read()
        writer.close()
        assert statuses(answer) == [200] * (1 + num_more)

    async def test_a_deaf_connection_sees_the_hang_up(self, raw: RawServer) -> None:
        _, writer = await raw.open(post("/wait", b"x") + GET * 1000)
        await raw.until(lambda: raw.app.seen)
        writer.close()
        await raw.until_idle()
        assert raw.app.num_hang_ups == 1

    async def test_what_is_dropped_has_an_end(self, raw: RawServer) -> None:
        answer, num_sent = await flood(raw, post("/wait", b"") + b"\x00", b"x" * 2**16, 2 * MAX_DISCARDED_BYTES)
        assert num_sent < 2 * MAX_DISCARDED_BYTES
        assert answer == b""
        await raw.until_idle()

    async def test_a_body_behind_its_answer_is_read_to_an_end(self, raw: RawServer) -> None:
        """A client reads the answer once it has sent all; one that never ends is cut."""
        body = b"x" * (MAX_DISCARDED_BYTES // 8)
        reader, writer = await raw.open(post("/unread", body) + LAST)
        await writer.drain()
        assert statuses(await reader.read()) == [200, 200]
        writer.close()
        head = b"POST /unread HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 9\r\n\r\n"
        reader, writer = await raw.open(head + b"12345")
        assert await reader.readuntil(b";") == await raw.exchange(head + b"123456789")
        [connection] = raw.connections
        assert not connection.transport.is_closing(), "what still comes would meet a reset, and take the answer away"
        writer.write(b"6789")
        assert await reader.read() == b""
        writer.close()
        head = b"POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999\r\n\r\n"
        _, num_sent = await flood(raw, head, b"x" * 2**16, 2 * MAX_DISCARDED_BYTES)
        assert num_sent < 2 * MAX_DISCARDED_BYTES
        await raw.until_idle()


class TestDeadlines:
    """The clock is the test's; the bounds are those of the settings, 30, 10, 60 and 60 s."""

    async def late(self, raw: RawServer, data: bytes, phase: Phase, seconds: float) -> bytes:
        """Send `data`, wait for its `phase`, and let time pass. Returns what came until the server hung up."""
        reader, writer = await raw.open(data)
        await raw.until(lambda: raw.connections and raw.connections[0].phase is phase)
        [connection] = raw.connections
        if phase is Phase.IDLE:
            await raw.until(lambda: connection._num_head_bytes == len(data))
        raw.late(seconds - 0.1)
        assert not connection.transport.is_closing()
        assert connection.phase is phase
        raw.late(0.2)
        answer = await reader.read()
        writer.close()
        await raw.until_idle()
        return answer

    async def test_before_the_first_byte(self, raw: RawServer) -> None:
        assert await self.late(raw, b"", Phase.IDLE, 30) == b""
        assert await self.late(raw, b"\r\n", Phase.IDLE, 30) == b""

    async def test_between_requests(self, raw: RawServer) -> None:
        reader, writer = await raw.open(GET)
        assert await reader.readuntil(b";")
        await raw.until(lambda: raw.connections[0].phase is Phase.IDLE)
        raw.late(29)
        writer.write(GET)
        assert await reader.readuntil(b";")
        raw.late(29)
        assert raw.connections
        raw.late(2)
        assert await reader.read() == b""
        writer.close()

    @pytest.mark.parametrize("data", [b"G", GET[:-2], GET[:20], GET[:-2] + UPGRADE])
    async def test_a_head(self, raw: RawServer, data: bytes) -> None:
        answer = await self.late(raw, data, Phase.HEAD, 10)
        assert statuses(answer) == [408]
        assert "head did not arrive within 10 s" in error_in(answer)

    async def test_a_head_that_trickles(self, raw: RawServer) -> None:
        reader, writer = await raw.open(b"GET /a HTTP/1.1\r\nhost: x\r\n")
        await raw.until(lambda: raw.connections and raw.connections[0].phase is Phase.HEAD)
        [connection] = raw.connections
        for number in range(5):
            before = connection._num_head_bytes
            writer.write(b"x%d: y\r\n" % number)
            await raw.until(lambda before=before: connection._num_head_bytes > before)
            raw.late(2.01)
        assert statuses(await reader.read()) == [408]
        writer.close()

    @pytest.mark.parametrize(
        "data", [post("/b", b"x" * 100)[:-1], CHUNKED, CHUNKED + b"1\r\nx\r\n", CHUNKED + b"1\r\nx\r\n0\r\nx: y\r\n"]
    )
    async def test_a_body(self, raw: RawServer, data: bytes) -> None:
        answer = await self.late(raw, data, Phase.BODY, 60)
        assert statuses(answer) == [408]
        assert "body did not arrive within 60 s" in error_in(answer)
        assert raw.app.num_hang_ups == 1

    async def test_an_upload_that_keeps_arriving(self, raw: RawServer) -> None:
        """An application marks it (quire/server/json_bodies.py)."""
        head = b"POST /b HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\n\r\n"
        reader, writer = await raw.open(head)
        await raw.until(lambda: raw.connections and raw.connections[0].phase is Phase.BODY)
        [connection] = raw.connections
        connection.cycle.scope[UPLOAD] = True
        for _ in range(5):
            deadline = connection._deadline
            writer.write(b"x" * MIN_UPLOADED_BYTES)
            raw.late(50)
            await raw.until(lambda deadline=deadline: connection._deadline > deadline)
        writer.write(b"x" * (MIN_UPLOADED_BYTES - 1))
        await writer.drain()
        raw.late(61)
        assert statuses(await reader.read()) == [408]
        writer.close()
        await raw.until_idle()

    async def test_a_body_behind_its_answer(self, raw: RawServer) -> None:
        answer = await self.late(raw, post("/unread", b"x" * 100)[:-1], Phase.BODY, 60)
        assert statuses(answer) == [200]

    async def test_an_answer_may_take_its_time(self, raw: RawServer) -> None:
        reader, writer = await raw.open(post("/wait", b""))
        await raw.until(lambda: raw.app.seen)
        raw.late(100_000)
        raw.app.release.set()
        assert statuses(await reader.readuntil(b";")) == [200]
        writer.close()

    async def test_behind_an_answer_that_runs(self, raw: RawServer) -> None:
        """A late second request does not end the first; the connection ends behind it."""
        reader, writer = await raw.open(post("/wait", b"x") + post("/b", b"x" * 100)[:-1])
        await raw.until(lambda: raw.app.seen and raw.connections[0].pipeline)
        raw.late(61)
        assert raw.connections
        raw.app.release.set()
        answer = await reader.read()
        assert statuses(answer) == [200]
        assert answer.endswith(b"/wait:x;")
        writer.close()
        assert raw.app.seen == [("/wait", b"x")]

    async def test_a_refused_client_that_stays(self, raw: RawServer) -> None:
        reader, writer = await raw.open(b"\x00")
        assert statuses(await reader.read()) == [400]
        assert raw.connections
        raw.late(LINGER_SECONDS)
        await raw.until_idle()
        writer.close()

    async def test_settings(self) -> None:
        async with raw_server(keep_alive_timeout=1, header_timeout=2, body_timeout=3) as raw:
            assert await self.late(raw, b"", Phase.IDLE, 1) == b""
            assert statuses(await self.late(raw, b"GET", Phase.HEAD, 2)) == [408]
            assert statuses(await self.late(raw, CHUNKED, Phase.BODY, 3)) == [408]


class TestReaders:
    """A client that reads nothing is cut, one that reads slowly is not."""

    async def stall(self, raw: RawServer, path: str) -> socket.socket:
        """A connection that asked for `path` and reads nothing, once the server can write no more."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", raw.port))
        await loop.sock_sendall(client, post(path, b""))
        await raw.until(lambda: raw.connections and raw.connections[0].flow.write_paused)
        return client

    async def test_a_stream(self, raw: RawServer) -> None:
        client = await self.stall(raw, "/endless")
        raw.late(0)
        raw.late(59)
        assert raw.connections
        assert raw.app.num_hang_ups == 0
        raw.late(2)
        await raw.until_idle()
        assert raw.app.num_hang_ups == 1
        client.close()

    async def test_a_slow_one(self, raw: RawServer) -> None:
        client = await self.stall(raw, "/endless")
        raw.late(0)
        loop = asyncio.get_running_loop()
        [connection] = raw.connections
        for _ in range(4):
            raw.late(40)
            seen = raw.app.num_chunks_sent
            while raw.app.num_chunks_sent == seen:
                assert await loop.sock_recv(client, 4 * MIN_READ_BYTES)
            await raw.until(lambda: connection.flow.write_paused)
            raw.late(0)
            assert raw.connections == [connection]
        client.close()
        await raw.until_idle()

    async def test_a_whole_answer(self) -> None:
        async with raw_server(write_timeout=7) as raw:
            reader, writer = await raw.open(GET)
            await reader.readuntil(b";")
            [connection] = raw.connections
            transport = connection.transport
            left = 0

            class Transport:
                """Of a kernel that takes what it is told to."""

                def __getattr__(self, name: str) -> Any:
                    return (lambda: left) if name == "get_write_buffer_size" else getattr(transport, name)

            connection.transport = Transport()  # type: ignore[assignment]
            for seconds, left in ((0, 200_000), (6, 130_000), (6, 100_000), (0.9, 100_000)):  # noqa: B007
                raw.late(seconds)
                assert not transport.is_closing()
            raw.late(0.2)  # 7.1 s ago it had read 70,000 bytes, since then too few
            assert transport.is_closing()
            writer.close()


class TestConnectionLimit:
    async def test_more_are_told_and_closed(self) -> None:
        async with raw_server(max_connections=3) as raw:
            held = [await raw.open(GET) for _ in range(3)]
            for reader, _ in held:
                await reader.readuntil(b";")
            answer = await raw.exchange(post("/b", b"x" * 100_000))
            assert statuses(answer) == [503]
            assert b"Retry-After: 1" in answer
            assert "--max-connections" in error_in(answer)
            held.pop()[1].close()
            await raw.until(lambda: len(raw.connections) == 2)
            assert statuses(await raw.exchange(LAST)) == [200]
            assert [path for path, _ in raw.app.seen] == ["/a", "/a", "/a", "/last"]
            for _, writer in held:
                writer.close()

    async def test_many_more_are_closed_at_once(self) -> None:
        async with raw_server(max_connections=1) as raw:
            held = [await raw.open() for _ in range(1 + MAX_NUM_SURPLUS)]
            await raw.until(lambda: len(raw.connections) == 1 + MAX_NUM_SURPLUS)
            with contextlib.suppress(ConnectionError):
                assert await raw.exchange(b"") == b""
            assert len(raw.connections) == 1 + MAX_NUM_SURPLUS
            raw.late(11)
            await raw.until(lambda: len(raw.connections) == 1)
            for _, writer in held:
                writer.close()


async def test_the_end_with_all_kinds_of_connections_open() -> None:
    """None of them holds up the server beyond its shutdown grace of 2 s (here: the loop below would not end)."""
    async with raw_server() as raw:
        writers = []
        for data in (b"", b"GET", post("/b", b"xx")[:-1], GET, post("/wait", b""), post("/unread", b"xx")[:-1]):
            writers.append((await raw.open(data))[1])
        await raw.until(lambda: len(raw.connections) == 6 and len(raw.app.seen) == 3)
    assert all(task.done() for task in raw.server.server_state.tasks)
    for writer in writers:
        writer.close()
