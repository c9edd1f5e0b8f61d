"""Batch of requests that the application answers without a socket, for `quire run-batch` and /v1/batches."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.types import ASGIApp

from quire.server.batch_lines import BYTE_ORDER_MARK, BatchLine, BatchResponse, BatchResult, custom_id_of
from quire.server.errors import error_type
from quire.server.openapi import OPERATIONS, Operation

if TYPE_CHECKING:
    import httpx

PATHS = tuple(path for (_, path), operation in OPERATIONS.items() if operation.is_queued)
MALFORMED = "malformed_batch_line"
"""Error code for a line that is not a request."""
DUPLICATE = "duplicate_custom_id"
NO_JSON = "answer_is_not_json"
"""Error code for a line whose answer (raw bytes) fits no result."""
LARGE_BYTES = 2**20
"""Length from which a line is read on another thread than the loop's."""
_HEADERS = {"Content-Type": "application/json"}
_HOST = "http://localhost"


def _is_streamed_by_default(operation: Operation) -> bool:
    fields = msgspec.structs.fields(operation.request) if operation.request is not None else ()
    return any(each.name == "stream" and each.default is True for each in fields)


_STREAMED = {path for (_, path), operation in OPERATIONS.items() if _is_streamed_by_default(operation)}


class _Asked(NamedTuple):
    """Request of a line. content: its body as JSON."""

    custom_id: str
    url: str
    content: bytes


class InvalidLineError(Exception):
    """Line that is not a request, or not a valid one. custom_id: its own, if known."""

    def __init__(self, message: str, code: str = "invalid_batch_line", custom_id: str | None = None) -> None:
        super().__init__(message)
        self.message, self.code, self.custom_id = message[:600], code, custom_id


@dataclass(frozen=True)
class Pace:
    """Pace of a batch. concurrency: lines at a time. max_bytes: limit of their total, if any; one larger line goes
    alone. places: shared by all batches. retry_after: seconds until an answer is asked for again; None: it stands."""

    concurrency: int
    max_bytes: int | None = None
    places: asyncio.Semaphore | None = None
    retry_after: Callable[[httpx.Response], float | None] = field(default=lambda _: None)


@dataclass
class BatchCounts:
    """Numbers of lines by outcome, for the batch's report. num_malformed: failed lines that were not requests."""

    num_answered: int = 0
    num_failed: int = 0
    num_malformed: int = 0

    @property
    def total(self) -> int:
        return self.num_answered + self.num_failed


async def run_batch(
    app: ASGIApp,
    lines: Iterable[bytes] | AsyncIterable[bytes],
    write: Callable[[bytes], object],
    *,
    pace: Pace,
    custom_ids: Iterable[str] = (),
) -> BatchCounts:
    """Answer each line that is not blank at this pace, and write one result each, in order; an invalid line's result is
    an error, as is a repeated `custom_id`'s. write: may return an awaitable. custom_ids: ids answered before. An error
    of `lines` or `write` ends the batch."""
    counts = BatchCounts()
    seen = set(custom_ids)
    running: deque[tuple[asyncio.Task[BatchResult], int]] = deque()
    num_bytes = 0

    async def finish_first() -> None:
        nonlocal num_bytes
        result = await running[0][0]
        num_bytes -= running.popleft()[1]
        counts.num_failed += result.error is not None
        counts.num_malformed += result.error is not None and result.error.get("code") == MALFORMED
        counts.num_answered += result.error is None
        written = write(msgspec.json.encode(result) + b"\n")
        if isinstance(written, Awaitable):
            await written

    def is_full(line: bytes) -> bool:
        is_heavy = pace.max_bytes is not None and num_bytes + len(line) > pace.max_bytes
        return len(running) >= pace.concurrency or is_heavy

    import httpx  # slow to import, and not needed before a server is ready

    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=_HOST, timeout=None) as client:
        try:
            number = 0
            async with contextlib.aclosing(_each(lines)) as each:
                async for line in each:
                    line = line.removeprefix(BYTE_ORDER_MARK) if number == 0 else line
                    number += 1
                    if not line.strip():
                        continue
                    while running and is_full(line):
                        await finish_first()
                    num_bytes += len(line)
                    asked = await _read(line)
                    running.append((asyncio.ensure_future(_answer(client, asked, seen, pace)), len(line)))
            while running:
                await finish_first()
        finally:
            for task, _ in running:
                task.cancel()
            await asyncio.gather(*(task for task, _ in running), return_exceptions=True)
    return counts


async def _each(lines: Iterable[bytes] | AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    if isinstance(lines, AsyncIterable):
        async for line in lines:
            yield line
    else:
        for line in lines:
            yield line


def read_line(line: bytes) -> BatchLine:
    """Decode and check a batch file's line. Raises InvalidLineError."""
    try:
        request = msgspec.json.decode(line, type=BatchLine)
        problem = _problem(request)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidLineError(f"the line is no request: {error}", MALFORMED, custom_id_of(line)) from None
    if problem is not None:
        raise InvalidLineError(problem, custom_id=request.custom_id)
    return request


async def _read(line: bytes) -> _Asked | InvalidLineError:
    return await asyncio.to_thread(_take_line, line) if len(line) > LARGE_BYTES else _take_line(line)


def _take_line(line: bytes) -> _Asked | InvalidLineError:
    try:
        request = read_line(line)
    except InvalidLineError as error:
        return error
    if request.url in _STREAMED:
        request.body.setdefault("stream", msgspec.Raw(b"false"))
    return _Asked(request.custom_id, request.url, msgspec.json.encode(request.body))


async def _answer(
    client: httpx.AsyncClient, asked: _Asked | InvalidLineError, custom_ids: set[str], pace: Pace
) -> BatchResult:
    result_id, custom_id = f"batch_req_{uuid.uuid4().hex}", asked.custom_id
    is_request = isinstance(asked, _Asked) or asked.code != MALFORMED
    if is_request and custom_id is not None:
        if custom_id in custom_ids:
            message = f"an earlier line has the custom_id {custom_id!r:.100}"
            return BatchResult(result_id, custom_id, None, _error(message, DUPLICATE))
        custom_ids.add(custom_id)
    if isinstance(asked, InvalidLineError):
        return BatchResult(result_id, custom_id, None, _error(asked.message, asked.code))
    answer = await _ask(client, asked, pace)
    response = BatchResponse(answer.status_code, answer.headers.get("x-request-id", result_id))
    if answer.status_code == HTTPStatus.OK:
        if (body := _json_line(answer.content)) is None:
            message = "the answer is not one JSON value, as a result's body must be"
            return BatchResult(result_id, custom_id, response, _error(message, NO_JSON))
        response.body = msgspec.Raw(body)
        return BatchResult(result_id, custom_id, response)
    return BatchResult(result_id, custom_id, response, _error_in(answer))


def _error_in(answer: httpx.Response) -> dict[str, Any]:
    found = msgspec.json.decode(answer.content)
    error = found.get("error", found) if isinstance(found, dict) else found
    return error if isinstance(error, dict) else {"message": str(error), "type": error_type(answer.status_code)}


def _json_line(content: bytes) -> bytes | None:
    try:
        msgspec.json.decode(content, type=msgspec.Raw)
        return msgspec.json.format(content, indent=-1) if b"\n" in content else content
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


async def _ask(client: httpx.AsyncClient, request: _Asked, pace: Pace) -> httpx.Response:
    while True:
        async with pace.places or contextlib.nullcontext():
            answer = await client.post(
                request.url, content=request.content, headers={"Content-Type": "application/json"}
            )
        seconds = pace.retry_after(answer)
        if seconds is None:
            return answer
        await asyncio.sleep(seconds)


def _problem(request: BatchLine) -> str | None:
    if request.method.upper() != "POST":
        return f"the method must be POST, not {request.method!r:.100}"
    if request.url not in PATHS:
        return f"the url must be one of {', '.join(PATHS)}, not {request.url!r:.100}"
    if _is_asked(request, "stream"):
        return "a batch is not streamed (stream must be false)"
    if request.url == "/v1/responses" and _is_asked(request, "background"):
        return "a batch waits for its answers (background must be false)"
    return None


def _is_asked(request: BatchLine, name: str) -> bool:
    return name in request.body and bool(msgspec.json.decode(request.body[name]))


def _error(message: str, code: str) -> dict[str, str]:
    return {"message": message, "type": error_type(400), "code": code}
