"""POST /debug/abort and GET /debug/log, for the live page with an admin's key; not served without such keys."""

from __future__ import annotations

import logging
import secrets
from collections import deque

import msgspec
from fastapi import FastAPI, Request, Response

from quire.logging import REQUEST_ID
from quire.server.auth import admin
from quire.server.context import ServerContext
from quire.server.errors import api_error
from quire.server.protocol.common import RequestStruct
from quire.server.query import whole_number
from quire.server.reading import read_request
from quire.server.responses import json_response

KEPT = 500
MAX_CHARACTERS = 4000
"""Limit of a kept message, stack included."""

_formatter = logging.Formatter()


class LogLine(msgspec.Struct, frozen=True):
    """Line of the log for the page. number: counts from 1. time: Unix time in seconds."""

    number: int
    time: float
    level: str
    logger: str
    message: str
    request_id: str | None


class LogTail(logging.Handler):
    """Handler that keeps the last records of the `quire` loggers between `open` and `close`. process: random name
    of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.process = secrets.token_hex(8)
        self._lines: deque[LogLine] = deque(maxlen=KEPT)
        self._number = 0

    def open(self) -> None:
        logging.getLogger("quire").addHandler(self)

    def close(self) -> None:
        logging.getLogger("quire").removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info:
                text = f"{text}\n{_formatter.formatException(record.exc_info)}"
        except Exception:  # a wrong format must not fail the caller; the first handler reports it
            text = str(record.msg)
        self._number += 1
        line = LogLine(
            self._number, record.created, record.levelname, record.name, text[:MAX_CHARACTERS], REQUEST_ID.get()
        )
        self._lines.append(line)

    def lines(self, after: int = 0) -> list[LogLine]:
        """Kept lines with a number above `after`, oldest first."""
        self.acquire()
        try:
            return [line for line in self._lines if line.number > after]
        finally:
            self.release()


class AbortLive(RequestStruct, kw_only=True, frozen=True):
    """Body of POST /debug/abort. request_id: request's id in /debug/kv, or an answer's."""

    request_id: str


class LogLines(msgspec.Struct):
    """Log of this API process, oldest first. process: name of the process, another one after a restart."""

    lines: list[LogLine]
    process: str


def add_live_admin_routes(app: FastAPI, context: ServerContext, *, keeps_log: bool) -> None:
    """Add both routes. keeps_log: False where they are not served, and no reader asks for the log."""
    tail = LogTail()
    if keeps_log:
        tail.open()
        context.on_exit.append(tail.close)

    @app.post("/debug/abort")
    @admin
    async def abort_live(request: Request) -> Response:
        """End one request early. 404 if this API process has no such request, 409 for a line of a batch."""
        context.check_alive()
        body = await read_request(request, context, AbortLive)
        name, mark, _ = body.request_id.rpartition("#")
        names = {name if mark else body.request_id}
        if any(map(context.running.is_line, names)):
            message = "this is a line of a batch, which would ask it again; cancel the batch to end its lines"
            raise api_error(409, message, "line_of_a_batch")
        names.update(context.running.end_turns([*names]))
        if not context.engine.knows(names):
            raise api_error(404, f"no request {body.request_id!r} runs or waits here", "request_not_found")
        await context.engine.abort(names)
        return Response()

    @app.get("/debug/log")
    @admin
    async def log(after: str = "0", process: str = "") -> Response:
        """Log lines for the page. after: number of the client's last line of `process`; if that is not this process,
        all."""
        number = whole_number("after", after, 0)
        lines = tail.lines(number if process in ("", tail.process) else 0)
        return json_response(LogLines(lines, tail.process), {"Cache-Control": "no-store"})
