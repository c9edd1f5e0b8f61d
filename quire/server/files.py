"""OpenAI's files (/v1/files) and batches (/v1/batches)."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire.errors import UserError
from quire.server.auth import client_of, owner_of
from quire.server.batch import PATHS
from quire.server.batch_runner import BatchRunner
from quire.server.batch_store import Batches
from quire.server.context import ServerContext
from quire.server.errors import invalid_request
from quire.server.file_store import ANYONE, BATCH_PURPOSE, OUTPUT_PURPOSE, FileStore, Quotas, Space, StoredFile
from quire.server.json_bodies import takes_upload
from quire.server.keys import KeyRing
from quire.server.protocol.files import BatchList, BatchRequest, FileDeleted, FileList
from quire.server.query import takes_query, whole_number
from quire.server.reading import read_request
from quire.server.request_share import Turns, share_of
from quire.server.responses import json_response
from quire.server.uploads import Uploads

MAX_LISTED_FILES, MAX_LISTED_BATCHES, LISTED_BATCHES = 10_000, 100, 20
CHUNK_BYTES = 64 * 1024
FILES, BATCHES = "/v1/files", "/v1/batches"


class _Listed(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=_Listed)


def add_file_routes(app: FastAPI, context: ServerContext, keys: KeyRing) -> None:
    """Add the routes and the runner of batches, with `--files-dir`. Raises ConfigError if the directory cannot be
    used."""
    settings = context.settings
    if settings.files_path is None:
        paths = [path + rest for path in (FILES, BATCHES) for rest in ("", "/{rest:path}")]
        app.state.unserved += [(Route(path, _nothing), "--files-dir") for path in paths]
        return
    quotas = Quotas(settings.files_quota_bytes, settings.max_file_bytes, settings.max_files, settings.max_open_batches)
    store = FileStore(settings.files_path, socket.gethostname(), quotas)
    _add_file_routes(app, context, store)
    runner = BatchRunner(app, context, store, keys)
    _add_batch_routes(app, context, store, runner)
    context.line_places = Turns(share_of(context.engine.max_num_seqs))
    context.on_start.append(runner.start)
    context.on_drain.append(runner.stop)
    context.on_close.append(runner.stop)


def _nothing(request: Request) -> Response:
    raise AssertionError("the route is not served")


def space_of(request: Request, store: FileStore) -> Space:
    """Files of the request's key. Clients without one share theirs, whatever key they make up."""
    return store.space(owner_of(request) if client_of(request).name else ANYONE)


def _add_file_routes(app: FastAPI, context: ServerContext, store: FileStore) -> None:
    uploads = Uploads(context)

    @app.post(FILES)
    @takes_upload
    async def upload(request: Request) -> Response:
        record = await uploads.receive(request, space_of(request, store), store.quotas.max_file_bytes)
        return json_response(record.to_object())

    @app.get(FILES)
    @takes_query("purpose", "limit", "order", "after")
    async def list_files(request: Request) -> Response:
        found = await store.in_thread(space_of(request, store).list_files)
        if (purpose := request.query_params.get("purpose")) is not None:
            if purpose not in (BATCH_PURPOSE, OUTPUT_PURPOSE):
                raise UserError(f"purpose must be {BATCH_PURPOSE} or {OUTPUT_PURPOSE}", param="purpose")
            found = [each for each in found if each.purpose == purpose]
        page, has_more = _page(request, found, MAX_LISTED_FILES, MAX_LISTED_FILES)
        ids = (page[0].id, page[-1].id) if page else (None, None)
        return json_response(FileList([each.to_object() for each in page], has_more, *ids))

    @app.get(FILES + "/{file_id}")
    async def retrieve_file(request: Request, file_id: str) -> Response:
        found = await store.in_thread(space_of(request, store).find_file, file_id)
        return json_response(found.to_object())

    @app.delete(FILES + "/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Response:
        await store.in_thread(space_of(request, store).delete_file, file_id)
        return json_response(FileDeleted(file_id))

    @app.get(FILES + "/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        space = space_of(request, store)
        found = await store.in_thread(space.find_file, file_id)
        return await _attachment(space, found)


async def _attachment(space: Space, record: StoredFile) -> Response:
    try:
        file = await space.store.in_thread(OpenFile, space.data_path(record.id))
    except FileNotFoundError:  # deleted this instant
        space.find_file(record.id)
        raise

    async def chunks() -> AsyncGenerator[bytes, None]:
        while chunk := await space.store.in_thread(file.read):
            yield chunk

    headers = {
        "Content-Length": str(record.num_bytes),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(Path(record.filename).name, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }
    return _Attachment(chunks(), space.store, file, headers)


class OpenFile:
    """File that threads read and one closes, maybe while another one reads: a descriptor closed amid a read may be
    another file's before the read."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._lock = threading.Lock()

    def read(self) -> bytes:
        """Next bytes; none at the end or after `close`."""
        with self._lock:
            return b"" if self._file.closed else self._file.read(CHUNK_BYTES)

    def close(self) -> None:
        with self._lock:
            self._file.close()


class _Attachment(StreamingResponse):
    """Stream of a file, closed at the end, however it comes."""

    media_type = "application/octet-stream"

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], store: FileStore, file: OpenFile, headers: dict[str, str]
    ) -> None:
        super().__init__(chunks, headers=headers)
        self._store, self._file = store, file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._store.begin(self._file.close)


def _add_batch_routes(app: FastAPI, context: ServerContext, store: FileStore, runner: BatchRunner) -> None:
    @app.post(BATCHES)
    async def create_batch(request: Request) -> Response:
        body = await read_request(request, context, BatchRequest)
        if body.endpoint not in PATHS:
            raise UserError(f"endpoint must be one of {', '.join(PATHS)}, not {body.endpoint!r:.100}", param="endpoint")
        context.check_alive()
        batch = await store.in_thread(Batches(space_of(request, store)).create, body)
        runner.wake()
        return json_response(batch.to_object())

    @app.get(BATCHES)
    @takes_query("limit", "after")
    async def list_batches(request: Request) -> Response:
        batches = Batches(space_of(request, store))
        known, has_more = _page(request, await store.in_thread(batches.list_known), LISTED_BATCHES, MAX_LISTED_BATCHES)
        page = await store.in_thread(batches.read_all, known)
        ids = (page[0].id, page[-1].id) if page else (None, None)
        return json_response(BatchList([each.to_object() for each in page], has_more, *ids))

    @app.get(BATCHES + "/{batch_id}")
    async def retrieve_batch(request: Request, batch_id: str) -> Response:
        found = await store.in_thread(Batches(space_of(request, store)).find_batch, batch_id)
        return json_response(found.to_object())

    @app.post(BATCHES + "/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        found = await store.in_thread(Batches(space_of(request, store)).cancel, batch_id)
        runner.wake()
        return json_response(found.to_object())


def _page(request: Request, items: Sequence[Item], default: int, most: int) -> tuple[Sequence[Item], bool]:
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise UserError(f"order must be asc or desc, not {order!r:.100}", param="order")
    limit = whole_number("limit", query.get("limit", str(default)), 1, most)
    listed = list(items) if order == "asc" else list(reversed(items))
    if (after := query.get("after")) is not None:
        places = [index for index, item in enumerate(listed) if item.id == after]
        if not places:
            raise invalid_request(f"there is no {after!r:.200} to list after", param="after")
        listed = listed[places[0] + 1 :]
    return listed[:limit], len(listed) > limit
