"""Raw bytes against a server with a fake engine: whatever one connection sends, the next request is answered."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import random
import re
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from quire.server.connection import BoundedHttpProtocol, Phase
from tests.fuzz.harness import Attack, Fuzzer
from tests.server.conftest import Served, serving
from tests.server.model_directory import write_model
from tests.server.raw import json_bodies_of, statuses

GUARD_SECONDS = 60.0
"""Against a hang: no verdict depends on it otherwise."""
POLL_SECONDS = 0.002
NUM_QUIET_POLLS = 3

JSON_TYPE = b"content-type: application/json\r\n"
UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


def _request(
    target: bytes = b"/v1/completions",
    body: bytes | None = None,
    *,
    method: bytes | None = None,
    headers: bytes = JSON_TYPE,
    host: bytes | None = b"quire",
) -> bytes:
    lines = [(method or (b"GET" if body is None else b"POST")) + b" " + target + b" HTTP/1.1"]
    if host is not None:
        lines.append(b"host: " + host)
    if body is not None:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n" + headers + b"\r\n" + (body or b"")


def _chunked(*chunks: bytes, trailers: bytes = b"", headers: bytes = b"") -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: quire\r\ntransfer-encoding: chunked\r\n" + JSON_TYPE + headers
    return head + b"\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\n" + trailers + b"\r\n"


COMPLETION = json.dumps({"prompt": "=abc", "max_tokens": 4}).encode()
STREAM = json.dumps({"prompt": "abc", "max_tokens": 200, "stream": True, "n": 2}).encode()
LONG = json.dumps({"prompt": "abc", "max_tokens": 250}).encode()
GOOD = _request(body=COMPLETION, headers=JSON_TYPE + b"connection: close\r\n")

CORPUS: tuple[bytes, ...] = (
    _request(body=COMPLETION),
    _request(body=STREAM),
    _request(b"/health"),
    _request(b"/debug/kv"),
    # A head, trailers or chunk extensions without end.
    b"GET /health HTTP/1.1\r\nx: " + b"x" * 70_000,
    _request(b"/health", headers=b"a: b\r\n" * 5_000),
    _chunked(COMPLETION, trailers=b"x1: y\r\n" * 20_000),
    _chunked(COMPLETION, trailers=b"x" * 100_000),
    _chunked(b"{", headers=b"authorization: none\r\n", trailers=b"host: evil.example\r\n"),
    b"POST /v1/completions HTTP/1.1\r\nhost: quire\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"e" * 100_000,
    # Foreign names and pages, and bodies that a page may send.
    _request(b"/debug/kv", host=b"evil.example:8170"),
    _request(b"/v1/completions/", COMPLETION, host=b"evil.example"),
    _request(b"http://evil.example/debug/kv"),
    _request(b"http://quire/health"),
    _request(body=COMPLETION, headers=b"content-type: text/plain\r\n"),
    _request(body=COMPLETION, headers=JSON_TYPE + b"origin: https://evil.example\r\n"),
    _request(b"/v1/completions", method=b"OPTIONS", headers=b"origin: null\r\naccess-control-request-method: POST\r\n"),
    # Upgrades, which once lost the body.
    _request(body=COMPLETION, headers=JSON_TYPE + UPGRADE),
    _chunked(COMPLETION[:5], COMPLETION[5:], headers=UPGRADE),
    _request(b"/health", headers=b"connection: upgrade\r\nupgrade: websocket\r\n"),
    b"CONNECT quire:443 HTTP/1.1\r\nhost: quire\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    # Two ways to read one head.
    _request(b"/health", host=None),
    _request(b"/health", headers=b"host: evil.example\r\n"),
    _request(body=COMPLETION, headers=JSON_TYPE + b"content-length: 3\r\n"),
    _request(body=COMPLETION, headers=JSON_TYPE + b"transfer-encoding: chunked\r\n"),
    _chunked(COMPLETION, headers=b"transfer-encoding: identity\r\n"),
    # Pipelines, and hang-ups behind them.
    _request(body=STREAM) + _request(b"/health"),
    _request(body=LONG) + _request(body=LONG) + b"GET /hea",
    _request(b"/health", headers=b"") * 40,
    _request(body=STREAM) + b"\x00garbage",
    # Bodies that do not come, or do not end.
    _request(body=COMPLETION)[:-3],
    _request(body=b" " * 100_000 + COMPLETION)[:-3],
    b"POST /v1/completions HTTP/1.1\r\nhost: quire\r\ncontent-length: 99999999999\r\n" + JSON_TYPE + b"\r\n{",
    _request(body=COMPLETION, headers=JSON_TYPE + b"expect: 100-continue\r\n"),
    _request(body=COMPLETION, headers=JSON_TYPE + b"content-encoding: gzip\r\n"),
    _request(b"/" + b"x" * 60_000),
    _request(b"/v1/models/%00%ff%2e%2e"),
    _request(b"/metrics", headers=b"accept: application/openmetrics-text; version=1.0.0\r\n"),
)


def _duplicate_header(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\r\n")
    line = rng.choice(lines[:12])
    lines.insert(rng.randrange(1, len(lines) + 1), line)
    return b"\r\n".join(lines)


def _many_headers(rng: random.Random, data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\r\n" + b"h%d: v\r\n" % rng.randrange(9) * rng.choice((3, 130, 9000)), 1)


def _other_host(rng: random.Random, data: bytes) -> bytes:
    hosts = (b"evil.example", b"", b"localhost:1", b"[::1]", b"127.0.0.1.", b"a b", b"quire@evil", b"\xff", b"x" * 300)
    return data.replace(b"host: quire", b"host: " + rng.choice(hosts), 1)


def _other_number(rng: random.Random, data: bytes) -> bytes:
    """Another number in place of one: lengths, chunk sizes, versions."""
    places = [match.span() for match in re.finditer(rb"[0-9]+", data[:5000])]
    if not places:
        return data
    start, end = rng.choice(places)
    numbers = (b"0", b"-1", b"1", b"+3", b"ffffffff", b"18446744073709551616", b"0x10", b"9" * 40, b"", b"007")
    return data[:start] + rng.choice(numbers) + data[end:]


def _flip(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(min(len(data), 600))
    return data[:place] + bytes([rng.randrange(256)]) + data[place + rng.randrange(2) :]


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(1, len(data) + 1)]


def _line_ends(rng: random.Random, data: bytes) -> bytes:
    return data.replace(b"\r\n", rng.choice((b"\n", b"\r", b"\r\n ", b"\r\r\n")), rng.randrange(1, 9))


def _absolute(rng: random.Random, data: bytes) -> bytes:
    return data.replace(
        b" /", rng.choice((b" http://quire/", b" http://evil/", b" //evil/", b" *", b" https://u@quire/")), 1
    )


def _pipeline(rng: random.Random, data: bytes) -> bytes:
    return data + rng.choice(CORPUS) * rng.choice((1, 1, 3))


def _trailers(rng: random.Random, data: bytes) -> bytes:
    return data.replace(b"0\r\n", b"0\r\n" + b"t: u\r\n" * rng.choice((1, 200, 30_000)))


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _duplicate_header,
    _many_headers,
    _other_host,
    _other_number,
    _flip,
    _cut,
    _line_ends,
    _absolute,
    _pipeline,
    _trailers,
)

T = TypeVar("T")


class _Errors(logging.Handler):
    """What the server says went wrong inside it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))

    def of_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.messages.append(repr(context))

    @contextlib.contextmanager
    def of_log(self, name: str) -> Iterator[None]:
        logger = logging.getLogger(name)
        level = logger.level
        logger.setLevel(logging.ERROR)
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
            logger.setLevel(level)


class _Server:
    """A server in a thread of its own, on the loop that `quire serve` uses."""

    def __init__(self, model_path: Path) -> None:
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._served: Served | None = None
        self._ready = threading.Event()
        self.errors = _Errors()
        self._loop.set_exception_handler(self.errors.of_loop)
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(model_path),))

    def __enter__(self) -> _Server:
        self._thread.start()
        assert self._ready.wait(GUARD_SECONDS)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(GUARD_SECONDS)
        assert not self._thread.is_alive(), "the server does not end"
        self._loop.close()

    async def _serve(self, model_path: Path) -> None:
        async with serving(model_path, live=True) as served:
            self._served = served
            with self.errors.of_log("uvicorn.error"), self.errors.of_log("quire"):
                self._ready.set()
                await self._stop.wait()
        self._served = None

    @property
    def served(self) -> Served:
        assert self._served is not None
        return self._served

    @property
    def port(self) -> int:
        return int(self.served.url.rpartition(":")[2])

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(GUARD_SECONDS)

    async def is_waiting_for_clients(self) -> bool:
        """Whether no request that has arrived in full is being answered."""
        assert self.served.server is not None
        connections = [c for c in self.served.server.server_state.connections if isinstance(c, BoundedHttpProtocol)]
        return all(c._running is None or (c.phase is Phase.BODY and c.cycle is c._running) for c in connections)

    async def what_is_left(self) -> dict[str, int]:
        """Of everything that requests take: nothing once they are gone."""
        served = self.served
        assert served.server is not None
        assert served.app is not None
        stats = await served.engine.stats()
        left = {
            "connections": len(served.server.server_state.connections),
            "tasks": len(served.server.server_state.tasks),
            "body bytes": json_bodies_of(served.app).num_bytes,
            "requests": served.engine.num_unfinished,
            "blocks": stats.num_used_blocks,
        }
        return {name: count for name, count in left.items() if count}

    def check_idle(self) -> None:
        end = time.monotonic() + GUARD_SECONDS
        while left := self.run(self.what_is_left()):
            assert time.monotonic() < end, f"left behind: {left}"
            time.sleep(POLL_SECONDS)


def _attack(server: _Server, rng: random.Random) -> None:
    data = rng.choice(CORPUS)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        data = rng.choice(MUTATIONS)(rng, data)
    answers = _converse(server, rng, data)
    assert not answers or answers.startswith(b"HTTP/1.1 "), f"{data[:300]!r}: {answers[:300]!r}"
    found = [status for status in statuses(answers) if status not in _EXPECTED]
    assert not found, f"{data[:300]!r}: {found} {answers[:600]!r}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=GUARD_SECONDS) as client:
        client.sendall(GOOD)
        good = _read_to_end(client)
    assert statuses(good) == [200], good[:300]
    assert b'"text":"abc"' in good, good
    server.check_idle()
    assert not server.errors.messages, f"{data[:300]!r}: {server.errors.messages}"


_EXPECTED = {100, 200, 400, 401, 403, 404, 405, 408, 413, 415, 421, 422, 429, 431, 501, 503, 505}


def _converse(server: _Server, rng: random.Random, data: bytes) -> bytes:
    """Send `data` in pieces, read for a while or not at all, and hang up. Returns what was read."""
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 3, 20))))
    pieces = [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]
    ending = rng.choice(("read", "read", "half-close", "close", "reset"))
    with socket.create_connection(("127.0.0.1", server.port), timeout=GUARD_SECONDS) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for piece in pieces:
                client.sendall(piece)
            if ending == "half-close":
                client.shutdown(socket.SHUT_WR)
            elif ending == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if ending in ("read", "half-close"):
                return _read_while_it_works(server, client)
        except TimeoutError:
            raise
        except OSError:  # the server has hung up
            pass
    return b""


def _read_while_it_works(server: _Server, client: socket.socket) -> bytes:
    """Until the server hangs up, or has waited for more for some polls."""
    found = b""
    num_quiet = 0
    client.settimeout(POLL_SECONDS)
    while num_quiet < NUM_QUIET_POLLS:
        try:
            part = client.recv(2**20)
        except TimeoutError:
            num_quiet = num_quiet + 1 if server.run(server.is_waiting_for_clients()) else 0
            continue
        except ConnectionError:
            break
        if not part:
            break
        num_quiet = 0
        found += part
    return found


def _read_to_end(client: socket.socket) -> bytes:
    parts = []
    while part := client.recv(2**20):
        parts.append(part)
    return b"".join(parts)


@contextlib.contextmanager
def _target() -> Iterator[Attack]:
    with tempfile.TemporaryDirectory() as directory:
        before = _count()
        with _Server(write_model(Path(directory) / "tiny")) as server:
            yield lambda rng: _attack(server, rng)
            server.check_idle()
        assert _count() == before, "connections or requests stay in memory"


def _count() -> int:
    """Connections and requests that are in memory."""
    gc.collect()
    return sum(issubclass(type(found), BoundedHttpProtocol | RequestResponseCycle) for found in gc.get_objects())


RAW_HTTP = Fuzzer("raw_http", _target, num_test_cases=120)
