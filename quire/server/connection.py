"""HTTP connection: uvicorn's protocol over httptools, with limits on what a client may send and hold.

uvicorn limits neither heads, trailers, pipelined requests nor time.
"""

from __future__ import annotations

import enum
import http
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.clock import Clock
from quire.server.errors import ApiError, error_body, invalid_request, unavailable
from quire.server.settings import ServerSettings

CHUNK_FRAMING_BYTES = 16
"""Framing bytes per chunk of a body that do not count as head."""
MAX_NUM_PIPELINED = 16
MAX_PIPELINED_BYTES = 64 * 1024
"""Limit of pipelined requests kept during an answer; beyond it the connection then ends."""
MAX_DISCARDED_BYTES = 64 * 2**20
"""Bytes dropped of a request answered early."""
MIN_READ_BYTES = 64 * 1024
"""Bytes of an answer that a client must read within the write timeout."""
LINGER_SECONDS = 2.0
"""Seconds for a refused client to read the error."""
MAX_NUM_SURPLUS = 256
"""Connections beyond the limit that get an error response before closing."""


class Phase(enum.IntEnum):
    """Phase in which an HTTP connection waits; entering any but ANSWER starts its deadline."""

    IDLE = 0
    """Waiting for the first byte of a request."""
    HEAD = 1
    BODY = 2
    ANSWER = 3
    """The application answers a request that has arrived in full."""
    CLOSING = 4
    """Client reads the refusal; further data is dropped."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """One connection's limits of sizes and times, from ServerSettings. Times in seconds of `clock`; `seconds` is
    indexed by phase."""

    seconds: tuple[float, ...]
    write_seconds: float
    max_connections: int
    max_head_bytes: int
    """Total of request line, headers, trailers and chunk extensions of one request."""
    max_num_headers: int
    """Maximum headers and trailers in one request."""
    clock: Clock

    @classmethod
    def of(cls, settings: ServerSettings, clock: Clock) -> ConnectionLimits:
        seconds = {
            Phase.IDLE: settings.keep_alive_timeout,
            Phase.HEAD: settings.header_timeout,
            Phase.BODY: settings.body_timeout,
            Phase.ANSWER: math.inf,
            Phase.CLOSING: LINGER_SECONDS,
        }
        return cls(
            seconds=tuple(seconds[phase] for phase in Phase),
            write_seconds=settings.write_timeout,
            max_connections=settings.max_connections,
            max_head_bytes=settings.max_head_bytes,
            max_num_headers=settings.max_num_headers,
            clock=clock,
        )


UPLOAD = "quire.upload"
"""Entry of a request's scope if its body may take longer than the body timeout."""
MIN_UPLOADED_BYTES = 64 * 1024
"""Bytes of an upload that must arrive within the body timeout."""
CHUNK_WRITER = "quire.chunk_writer"
"""Entry of a request's scope with the ChunkWriter of its answer."""


class ChunkWriter:
    """Writer of an answer's later chunks straight to the connection, past the middlewares."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def write(self, chunk: bytes) -> bool:
        """Return False, with nothing written, if the chunk must pass the middlewares: for a slow or gone client, an
        answer not chunked, or an empty chunk."""
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding or cycle.response_complete:
            return False
        if not chunk:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return True


class BoundedHttpProtocol(HttpToolsProtocol):
    """Protocol that reads without pause, to see a hang-up, and refuses what exceeds a limit.

    The owner calls `check_deadlines` about once a second.
    """

    def __init__(self, limits: ConnectionLimits, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._limits = limits
        self._now = limits.clock.now
        self._seconds = limits.seconds
        self.phase = Phase.IDLE
        self._deadline = math.inf
        self._running: RequestResponseCycle | None = None
        """Request being answered; those in `pipeline` follow."""
        self._is_surplus = False
        self._is_deaf = False
        """True if further data is dropped."""
        self._closes_behind_request = False
        self._refusal: ApiError | None = None
        self._num_head_bytes = 0
        self._num_headers = 0
        self._num_pipelined_bytes = 0
        self._num_uploaded_bytes = 0
        self._num_discarded_bytes = 0
        self._num_unsent_bytes = 0
        self._write_deadline = math.inf

    # Called by the transport

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        num_surplus = len(self.connections) - self._limits.max_connections
        if num_surplus > MAX_NUM_SURPLUS:
            transport.abort()
        self._is_surplus = num_surplus > 0
        self._enter(Phase.HEAD if self._is_surplus else Phase.IDLE)

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn tells the newest request only; with pipelined requests an older one is running.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._discard(len(data))
            return
        if self._is_surplus:
            # Only if the client has sent something: an answer without a request confuses clients.
            limit = self._limits.max_connections
            error = unavailable(f"the server has {limit} connections already, its limit (--max-connections)")
            error.headers["Retry-After"] = "1"
            self._refuse(error)
            return
        self._num_head_bytes += len(data)
        if self._running is not None and (self.phase is not Phase.BODY or self.pipeline):
            self._num_pipelined_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(self._refusal or _malformed(str(error)))
            return
        self._num_head_bytes = max(0, self._num_head_bytes)
        if self._num_head_bytes > self._limits.max_head_bytes:
            self._refuse(_head_too_large(f"{self._limits.max_head_bytes} bytes"))
        elif self._num_pipelined_bytes > MAX_PIPELINED_BYTES:
            self._refuse(_too_much_pipelined())

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
            else:
                return

    def resume_writing(self) -> None:
        super().resume_writing()
        self._num_unsent_bytes = 0  # the client has read what paused it

    def shutdown(self) -> None:
        if self._running is None:
            self.transport.close()
        else:
            super().shutdown()

    # Called by the parser. An exception stops it and drops the bytes not parsed yet.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_headers = 0
        self._enter(Phase.HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self._limits.max_num_headers:
            self._stop(_head_too_large(f"{self._limits.max_num_headers} headers"))
        if self.phase is Phase.HEAD:  # trailers are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            return
        self._check_head()
        if len(self.pipeline) == MAX_NUM_PIPELINED:
            self._stop(_too_much_pipelined())
        super().on_headers_complete()
        scope: Any = self.scope  # typed as ASGI's entries only
        scope[CHUNK_WRITER] = ChunkWriter(self.cycle)
        if not self.cycle.keep_alive:
            late: Any = _LateClosing(self, self.cycle)
            self.cycle.transport = late
        if self._running is None:
            self._running = self.cycle
        else:
            self.flow.resume_reading()  # uvicorn has paused it for pipelining
        self._enter(Phase.BODY)

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes -= len(body)
        if self.cycle.response_complete:
            self._discard(len(body))
        elif self.cycle is not self._running and len(self.cycle.body) + len(body) > MAX_PIPELINED_BYTES:
            self._stop(_too_much_pipelined())
        super().on_body(body)
        self._num_uploaded_bytes += len(body)
        if self._num_uploaded_bytes >= MIN_UPLOADED_BYTES and self.phase is Phase.BODY and UPLOAD in self.cycle.scope:
            self._num_uploaded_bytes = 0
            self._enter(Phase.BODY)

    def on_chunk_complete(self) -> None:
        self._num_head_bytes = max(0, self._num_head_bytes - CHUNK_FRAMING_BYTES)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_head_bytes = 0
        super().on_message_complete()
        self._enter(Phase.IDLE if self._running is None else Phase.ANSWER)
        if self._closes_behind_request:
            self.transport.close()

    def close_behind(self, cycle: RequestResponseCycle) -> None:
        """Close after an answer, or after its request if that still arrives."""
        if cycle is self._running and self.phase is Phase.BODY:
            self._closes_behind_request = True
        else:
            self.transport.close()

    # Called by uvicorn when an answer is complete

    def on_response_complete(self) -> None:
        self._running = self.pipeline[-1][0] if self.pipeline else None
        self._num_pipelined_bytes = 0
        super().on_response_complete()
        self._unset_keepalive_if_required()  # stops uvicorn's timer: `check_deadlines` replaces it
        if self._running is None:
            if self._is_deaf and not self.transport.is_closing():
                self._linger()
            elif self.phase is Phase.ANSWER:
                self._enter(Phase.IDLE)

    # Bounds

    def check_deadlines(self) -> None:
        """End the connection if its client is late in sending or reading."""
        now = self._now()
        num_unsent_bytes = self.transport.get_write_buffer_size()
        if num_unsent_bytes:
            self._check_reader(num_unsent_bytes, now)
            if self.phase is Phase.IDLE:
                self._enter(Phase.IDLE)
        else:
            self._num_unsent_bytes = 0
        if now >= self._deadline:
            self._deadline = math.inf
            self._end_late()

    def _check_reader(self, num_unsent_bytes: int, now: float) -> None:
        if self._running is not None and not self.flow.write_paused:
            self._num_unsent_bytes = 0
        elif self._num_unsent_bytes == 0 or num_unsent_bytes <= self._num_unsent_bytes - MIN_READ_BYTES:
            self._num_unsent_bytes = num_unsent_bytes
            self._write_deadline = now + self._limits.write_seconds
        elif now >= self._write_deadline:
            self.transport.abort()

    def _end_late(self) -> None:
        if self.phase is Phase.CLOSING:
            self.transport.abort()
        elif self._is_surplus or self.phase is Phase.IDLE or (self.cycle is not None and self._is_answered_early()):
            self.transport.close()
        else:
            what, seconds = self.phase.name.lower(), self._seconds[self.phase]
            self._refuse(invalid_request(f"the request's {what} did not arrive within {seconds:g} s", status=408))

    def _is_answered_early(self) -> bool:
        return self.phase is Phase.BODY and self.cycle.response_complete

    def _enter(self, phase: Phase) -> None:
        self._deadline = self._now() + self._seconds[phase]
        self.phase = phase

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded_bytes += num_bytes
        if self._num_discarded_bytes > MAX_DISCARDED_BYTES:
            self.transport.abort()

    def _check_head(self) -> None:
        """Refuse heads that two programs could read differently (request smuggling)."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._stop(invalid_request(f"HTTP/{version} is not served: HTTP/1.1 is", status=505))
        if self.parser.get_method() == b"CONNECT":
            self._stop(invalid_request("CONNECT is not served: this is no proxy", status=501))
        hosts, codings = [], []
        for name, value in self.headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"transfer-encoding":
                codings.append(value)
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            self._stop(_malformed(f"a request has one Host header, not {len(hosts)}"))
        if codings and (version == "1.0" or len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
            self._stop(_malformed("the only Transfer-Encoding is 'chunked', once, in HTTP/1.1"))
        if not self.url.startswith(b"/"):
            scheme, _, rest = self.url.partition(b"://")
            authority = rest.partition(b"/")[0].lower()
            if scheme.lower() not in (b"http", b"https") or authority != (hosts[0].lower() if hosts else b""):
                self._stop(_malformed("the request's target must be a path, or a URL with the host of the Host header"))

    def _head_without_upgrade(self) -> bytes:
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in (b"upgrade", b"http2-settings"))
            if name not in (b"upgrade", b"http2-settings") and (value or name != b"connection"):
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _stop(self, error: ApiError) -> NoReturn:
        self._refusal = error
        raise error

    def _refuse(self, error: ApiError) -> None:
        """Answer the arriving request with `error` and hang up; without `error` after earlier answers that still run,
        or at once if its answer has begun."""
        self._is_deaf = True
        arriving = self.cycle if self.phase is Phase.BODY else None
        if self._running is not None and self._running is not arriving:
            if self.pipeline and self.pipeline[0][0] is arriving:
                self.pipeline.popleft()
            self._deadline = math.inf  # `on_response_complete` closes
            return
        if arriving is not None:
            if arriving.response_complete:
                self.transport.close()
                return
            if arriving.response_started:
                self.transport.abort()
                return
            arriving.disconnected = True
            arriving.message_event.set()
            self._running = None
        self.flow.resume_reading()
        self.transport.write(_whole_answer(error, self.app, self.server_state.default_headers))
        self._linger()

    def _linger(self) -> None:
        self._enter(Phase.CLOSING)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()


class _LateClosing:
    """Transport given to uvicorn's cycle if the connection closes after its answer: delays `close`."""

    def __init__(self, protocol: BoundedHttpProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol.transport, name)

    def close(self) -> None:
        self._protocol.close_behind(self._cycle)


def _malformed(reason: str) -> ApiError:
    return invalid_request(f"the request is not valid HTTP: {reason}", code="invalid_http")


def _head_too_large(limit: str) -> ApiError:
    return invalid_request(f"the request's head is larger than {limit}", status=431)


def _too_much_pipelined() -> ApiError:
    return invalid_request("too many requests were sent ahead of an answer", status=400)


def _whole_answer(error: ApiError, app: object, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    body = error_body(error, {"app": app, "path": ""})
    headers: Mapping[str, str] = {
        **{name.decode("latin-1"): value.decode("latin-1") for name, value in default_headers},
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
