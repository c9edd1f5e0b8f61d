"""uvicorn, set up: HTTP/1.1 by httptools with a limit on the head of a request, which it lets grow without end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.server.errors import error_body, invalid_request
from quire.server.settings import ServerSettings

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together."""


KEEP_ALIVE_SECONDS = 30


class HttpServer(uvicorn.Server):
    """Leaves the signals to its owner."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_http_server(app: FastAPI, settings: ServerSettings, *, farewell_seconds: int) -> HttpServer:
    """farewell_seconds: what open connections get to finish once `should_exit` is set."""
    # Errors are logged where they become answers; uvicorn would log them again, and what any client can provoke.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    if settings.access_log:
        _log_accesses()
    return HttpServer(
        uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=settings.access_log,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=farewell_seconds,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
        )
    )


def _log_accesses() -> None:
    logger = logging.getLogger("uvicorn.access")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 and hangs up when a request's head does not end within MAX_HEAD_BYTES."""

    _in_body = False
    _num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if not self._in_body and self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._num_head_bytes = 0
        super().on_message_complete()

    def _refuse(self) -> None:
        error = invalid_request(f"the request's head is larger than {MAX_HEAD_BYTES} bytes", status=431)
        body = error_body(error)
        head = (
            "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
