"""POST /debug/abort and GET /debug/log, for the live page with an admin's key; not served without such keys."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request, Response

from quire.server.auth import admin
from quire.server.context import ServerContext
from quire.server.errors import api_error
from quire.server.log_tail import LogLine, LogTail
from quire.server.protocol.common import RequestStruct
from quire.server.query import whole_number
from quire.server.reading import read_request
from quire.server.responses import json_response


class AbortLive(RequestStruct, kw_only=True, frozen=True):
    """request_id: a request's id in /debug/kv, or an answer's."""

    request_id: str


class LogLines(msgspec.Struct):
    """Log of this API process, oldest first."""

    lines: list[LogLine]


def add_live_admin_routes(app: FastAPI, context: ServerContext) -> None:
    tail = LogTail()
    tail.open()
    context.on_exit.append(tail.close)

    @app.post("/debug/abort")
    @admin
    async def abort_live(request: Request) -> Response:
        """End one request early. 404 if this API process has none of that id."""
        context.check_alive()
        body = await read_request(request, context, AbortLive)
        name, mark, _ = body.request_id.rpartition("#")
        names = {name if mark else body.request_id}
        names.update(context.running.end_turns([*names]))
        if not context.engine.knows(names):
            raise api_error(404, f"no request {body.request_id!r} runs or waits here", "request_not_found")
        await context.engine.abort(names)
        return Response()

    @app.get("/debug/log")
    @admin
    async def log(after: str = "0") -> Response:
        """after: number of the last line that the client has."""
        return json_response(LogLines(tail.lines(whole_number("after", after, 0))), {"Cache-Control": "no-store"})
