"""Batch of requests that the application answers without a socket, for `quire run-batch`."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import httpx
import msgspec
from fastapi import FastAPI

from quire.server.batch_lines import BYTE_ORDER_MARK, BatchLine, BatchResponse, BatchResult, custom_id_of
from quire.server.errors import error_type
from quire.server.openapi import OPERATIONS

PATHS = tuple(path for (_, path), operation in OPERATIONS.items() if operation.is_queued)
MALFORMED = "malformed_batch_line"
"""Error code for a line that is not a request."""
DUPLICATE = "duplicate_custom_id"
_HOST = "http://localhost"


@dataclass
class BatchCounts:
    """num_malformed: failed lines that were not requests."""

    num_answered: int = 0
    num_failed: int = 0
    num_malformed: int = 0

    @property
    def total(self) -> int:
        return self.num_answered + self.num_failed


async def run_batch(
    app: FastAPI,
    lines: Iterable[bytes],
    write: Callable[[bytes], object],
    *,
    concurrency: int,
    custom_ids: Iterable[str] = (),
) -> BatchCounts:
    """Answer each line that is not blank, `concurrency` at a time, and write one result each, in order; an invalid
    line's result is an error. A repeated `custom_id` is invalid. custom_ids: ids answered before. An error of `lines`
    or `write` ends the batch."""
    counts = BatchCounts()
    seen = set(custom_ids)
    running: deque[asyncio.Task[BatchResult]] = deque()

    async def finish_first() -> None:
        result = await running[0]
        running.popleft()
        counts.num_failed += result.error is not None
        counts.num_malformed += result.error is not None and result.error.get("code") == MALFORMED
        counts.num_answered += result.error is None
        write(msgspec.json.encode(result) + b"\n")

    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=_HOST, timeout=None) as client:
        try:
            for number, line in enumerate(lines):
                line = line.removeprefix(BYTE_ORDER_MARK) if number == 0 else line
                if not line.strip():
                    continue
                if len(running) >= concurrency:
                    await finish_first()
                running.append(asyncio.ensure_future(_answer(client, line, seen)))
            while running:
                await finish_first()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    return counts


async def _answer(client: httpx.AsyncClient, line: bytes, custom_ids: set[str]) -> BatchResult:
    result_id = f"batch_req_{uuid.uuid4().hex}"
    try:
        request = msgspec.json.decode(line, type=BatchLine)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return BatchResult(result_id, custom_id_of(line), None, _error(f"the line is no request: {error}", MALFORMED))
    if request.custom_id in custom_ids:
        message = f"an earlier line has the custom_id {request.custom_id!r:.100}"
        return BatchResult(result_id, request.custom_id, None, _error(message, DUPLICATE))
    custom_ids.add(request.custom_id)
    if (problem := _problem(request)) is not None:
        return BatchResult(result_id, request.custom_id, None, _error(problem))
    headers = {"Content-Type": "application/json"}
    answer = await client.post(request.url, content=msgspec.json.encode(request.body), headers=headers)
    response = BatchResponse(answer.status_code, answer.headers.get("x-request-id", result_id))
    if answer.status_code == httpx.codes.OK:
        response.body = msgspec.Raw(answer.content)
        return BatchResult(result_id, request.custom_id, response)
    found = msgspec.json.decode(answer.content)
    return BatchResult(result_id, request.custom_id, response, found.get("error", found))


def _problem(request: BatchLine) -> str | None:
    if request.method.upper() != "POST":
        return f"the method must be POST, not {request.method!r}"
    if request.url not in PATHS:
        return f"the url must be one of {', '.join(PATHS)}, not {request.url!r}"
    if request.body.get("stream"):
        return "a batch is not streamed (stream must be false)"
    if request.url == "/v1/responses" and request.body.get("background"):
        return "a batch waits for its answers (background must be false)"
    return None


def _error(message: str, code: str = "invalid_batch_line") -> dict[str, str]:
    return {"message": message[:1000], "type": error_type(400), "code": code}
