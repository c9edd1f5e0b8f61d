"""Configuration of uvicorn: HTTP/1.1 by httptools, with limited connections (quire/server/connection.py)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from quire.clock import Clock, SystemClock
from quire.logging import make_handler
from quire.server.connection import BoundedHttpProtocol, ConnectionLimits
from quire.server.listener import DEFAULT_CIPHERS, CertificateWatch
from quire.server.settings import ServerSettings

TICKS_PER_CHECK = 10
"""Ticks of uvicorn's server between checks; it ticks ten times a second."""


class HttpServer(uvicorn.Server):
    """Server that leaves signals to its owner, ends late connections and renews its certificate."""

    def __init__(self, config: uvicorn.Config, certificates: CertificateWatch | None = None) -> None:
        """certificates: watches files for renewal; None keeps the certificate of the start."""
        super().__init__(config)
        self._certificates = certificates

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_CHECK == 0:
            self.check_deadlines()
            if self._certificates is not None and self.config.ssl is not None:
                self._certificates.check(self.config.ssl)
        return await super().on_tick(counter)

    async def adopt(self, connection: socket.socket) -> None:
        """Serve a connection that another process has accepted; return once it is set up. A failed TLS handshake closes
        it."""
        loop = asyncio.get_running_loop()
        make: Any = self.config.http_protocol_class
        protocol = functools.partial(
            make,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        try:
            await loop.connect_accepted_socket(protocol, connection, ssl=self.config.ssl)
        except OSError:  # TLS's own errors included
            connection.close()

    def check_deadlines(self) -> None:
        for connection in list(self.server_state.connections):
            cast(BoundedHttpProtocol, connection).check_deadlines()


def make_http_server(
    app: FastAPI, settings: ServerSettings, *, shutdown_grace_seconds: int, clock: Clock | None = None
) -> HttpServer:
    """HTTP server of one process. shutdown_grace_seconds: time for open connections to finish once `should_exit` is
    set. clock: used for timeouts."""
    limits = ConnectionLimits.of(settings, clock or SystemClock())
    protocol: Any = functools.partial(BoundedHttpProtocol, limits)
    # Errors are logged where they become answers; uvicorn would log them again, even those any client can provoke.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    if settings.access_log:
        _log_accesses()
    return HttpServer(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=settings.access_log,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=shutdown_grace_seconds,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=settings.ssl_cert_reqs,
            ssl_ciphers=settings.ssl_ciphers or DEFAULT_CIPHERS,
        ),
        CertificateWatch(settings) if settings.enable_ssl_refresh else None,
    )


def _log_accesses() -> None:
    logger = logging.getLogger("uvicorn.access")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(make_handler())
        logger.addFilter(_add_fields)


def _add_fields(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple) and len(record.args) == 5:
        client, method, path, _, status = record.args
        record.fields = {"client": client, "method": method, "path": path, "status": status}
    return True
