"""Runner of batches: checks their input, answers their lines in the background, and writes their files. One API process
runs all; it holds `runner.lock`, which another gets when it dies. The state on disk alone says what is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Container, Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from quire.logging import get_logger
from quire.server.auth import LINE_OWNER, LineOwner
from quire.server.batch import Pace, run_batch
from quire.server.batch_check import check_input
from quire.server.batch_ends import split_journal, undone
from quire.server.batch_lines import AnsweredLine, read_answered, unanswered
from quire.server.batch_store import Batches, StoredBatch, open_batches
from quire.server.file_store import ANYONE, FileStore, held
from quire.server.keys import Client, KeyRing
from quire.server.request_share import share_of

if TYPE_CHECKING:
    import httpx

    from quire.server.context import ServerContext

logger = get_logger(__name__)

POLL_SECONDS = 0.5
SWEEP_SECONDS = 60.0
DISK_SECONDS = 10.0
"""Pause of a batch after an error of the disk."""
PROBE_BYTES = 256 * 1024
"""Bytes that the disk must take before lines are answered."""
MAX_LINE_BYTES_AT_ONCE = 64 * 2**20
"""Bytes of lines that are being answered, of one batch."""
MOST_RETRY_SECONDS = 30.0
QUOTA_EXCEEDED = "file_quota_exceeded"
_ENDING = ("cancelling", "finalizing")
"""Statuses in which no line is answered any more."""
_RETRIED = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


class BatchRunner:
    def __init__(self, app: FastAPI, context: ServerContext, store: FileStore, keys: KeyRing) -> None:
        self._app, self._context, self._store, self._keys = app, context, store, keys
        self._places = asyncio.Semaphore(share_of(context.engine.max_num_seqs))
        self._task: asyncio.Task[None] | None = None
        self._running: dict[str, tuple[str | None, asyncio.Task[None]]] = {}
        """Batch id -> owner and task. None: the batch is only ended, beside another one of its owner."""
        self._news = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """End at once; lines being answered are asked again after the next start."""
        if self._task is not None:
            self._task.cancel()

    def wake(self) -> None:
        self._news.set()

    async def _run(self) -> None:
        path = self._store.directory / "runner.lock"
        while True:
            try:
                with held(path, makes=True) as is_free:
                    if is_free:
                        await self._run_all()
            except Exception:
                logger.exception("batches: the runner goes on in %g s", DISK_SECONDS)
                await asyncio.sleep(DISK_SECONDS)
            await asyncio.sleep(POLL_SECONDS)

    async def _run_all(self) -> None:
        sweeping = asyncio.ensure_future(self._sweep_all())
        try:
            while True:
                try:
                    await self._start_next()
                except Exception:
                    logger.exception("batches: the directory of files fails; they go on in %g s", DISK_SECONDS)
                    await asyncio.sleep(DISK_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._news.wait()
                self._news.clear()
        finally:
            tasks = [sweeping, *(task for _, task in self._running.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sweep_all(self) -> None:
        """Sweep each key's files from time to time; an error of one key's holds up no other's."""
        while True:
            for owner in await self._store.in_thread(self._store.owners):
                try:
                    await self._store.in_thread(self._sweep, owner)
                except Exception:
                    logger.exception("files: a sweep fails")
            await asyncio.sleep(SWEEP_SECONDS)

    def _sweep(self, owner: str) -> None:
        space = self._store.space(owner)
        space.sweep()
        Batches(space).sweep()

    async def _start_next(self) -> None:
        running = set(self._running)  # before records are read: one that ends meanwhile is read too early
        answering = {owner for owner, _ in self._running.values()}
        for owner, batch in await self._store.in_thread(self._read_open, running):
            only_ends = batch.status in _ENDING or batch.has_ended or self._store.clock() >= batch.expires_at
            if not only_ends:
                if owner in answering:
                    continue
                answering.add(owner)
            task = asyncio.ensure_future(self._guarded(owner, batch))
            self._running[batch.id] = None if only_ends else owner, task
            task.add_done_callback(partial(self._note_end, batch.id))

    def _read_open(self, running: Container[str]) -> list[tuple[str, StoredBatch]]:
        """(owner, batch) of all batches that have not ended and are not among `running` ids, the oldest first."""
        found = []
        for owner, batch_id in open_batches(self._store):
            if batch_id in running:
                continue
            batches = Batches(self._store.space(owner))
            try:
                batch = batches.read(batch_id)
            except OSError as error:
                self._store.tell_once(batches.path(batch_id, "json"), error)
                continue
            if batch is not None:
                found.append((owner, batch))
        return sorted(found, key=lambda each: (each[1].created_ns, each[1].id))

    def _note_end(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._running[batch_id]
        self._news.set()

    async def _guarded(self, owner: str, batch: StoredBatch) -> None:
        try:
            await _Run(self, owner, batch).answer()
        except OSError as error:
            logger.error("batch %s: the disk fails (%s); it goes on in %g s", batch.id, error, DISK_SECONDS)
            await asyncio.sleep(DISK_SECONDS)
        except Exception:
            logger.exception("batch %s: it goes on in %g s", batch.id, DISK_SECONDS)
            await asyncio.sleep(DISK_SECONDS)

    def client_of(self, owner: str) -> Client | None:
        """Client of a batch's owner; None for a key that is no longer accepted."""
        return self._keys.anyone if owner == ANYONE else self._keys.owned_by(owner)

    def pace(self) -> Pace:
        places = share_of(self._context.engine.max_num_seqs)
        return Pace(places, MAX_LINE_BYTES_AT_ONCE, self._places, _retry_after)

    def app_for(self, client: Client, owner: str) -> Callable[[Scope, Receive, Send], Any]:
        """The application as it answers lines of this client."""
        line = LineOwner(client, "" if owner == ANYONE else owner)

        async def ask(scope: Scope, receive: Receive, send: Send) -> None:
            scope[LINE_OWNER] = line
            await self._app(scope, receive, send)

        return ask

    @property
    def store(self) -> FileStore:
        return self._store

    @property
    def is_draining(self) -> bool:
        return self._context.draining

    @property
    def max_line_bytes(self) -> int:
        return self._context.max_body_bytes


class _Run:
    """Run of one batch, from its state on disk to its end."""

    def __init__(self, runner: BatchRunner, owner: str, batch: StoredBatch) -> None:
        self._runner, self._owner, self._batch = runner, owner, batch
        self._store = runner.store
        self._space = self._store.space(owner)
        self._batches = Batches(self._space)
        self._num_left_bytes = 0
        """Bytes that the journal may still grow by."""

    async def answer(self) -> None:
        batch = self._batch
        if batch.has_ended:
            await self._store.in_thread(self._batches.clear, batch.id)
            return
        if batch.status == "validating":
            await self._check()
        if batch.status == "in_progress":
            outcome = await self._answer()
            if outcome is None:
                return  # for now
            batch.outcome = outcome
        elif batch.status == "cancelling":
            batch.outcome = batch.outcome or "cancelled"
        if not batch.has_ended:
            await self._finalize()

    async def _enter(self, status: str) -> None:
        batch = self._batch
        if (batch.status, status) != ("cancelling", "finalizing"):  # clients see the first until the end
            batch.status = status
            batch.times.setdefault(status, int(self._store.clock()))
        await self._store.in_thread(self._batches.write, batch)

    async def _check(self) -> None:
        batch = self._batch
        path = self._batches.path(batch.id, "input")
        batch.total, batch.errors = await self._store.in_thread(
            check_input, path, batch.endpoint, self._runner.max_line_bytes
        )
        if batch.errors:
            batch.total = 0
            await self._enter("failed")
            await self._store.in_thread(self._batches.clear, batch.id)
        else:
            await self._enter("in_progress")

    async def _answer(self) -> str | None:
        """Answer the lines that are left; return the batch's outcome, or None if it cannot go on for now."""
        batch, store = self._batch, self._store
        journal = self._batches.path(batch.id, "journal")
        answered = await store.in_thread(partial(read_answered, journal, is_ours=True))
        self._recount(answered)
        self._num_left_bytes = await store.in_thread(self._room)
        client = self._runner.client_of(self._owner)
        if store.clock() >= batch.expires_at:
            return "expired"
        if client is None:
            await asyncio.sleep(DISK_SECONDS)
            return None
        await store.in_thread(_check_room, journal)
        with await store.in_thread(partial(_append_to, journal)) as file:
            work = self._run_lines(client, answered, file)
            answering = asyncio.ensure_future(work)
            try:
                return await self._watch(answering)
            finally:
                answering.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.gather(answering, return_exceptions=True)

    def _recount(self, answered: list[AnsweredLine]) -> None:
        self._batch.failed = sum(each.has_failed for each in answered)
        self._batch.completed = len(answered) - self._batch.failed

    def _room(self) -> int:
        with self._space.lock():
            return self._store.quotas.max_bytes - self._space.num_used_bytes()

    async def _run_lines(self, client: Client, answered: list[AnsweredLine], journal: BinaryIO) -> None:
        seen = {each.custom_id for each in answered if each.custom_id is not None}
        with await self._store.in_thread(self._batches.path(self._batch.id, "input").open, "rb") as source:
            lines = _on_threads(self._store, unanswered(source, answered))
            app = self._runner.app_for(client, self._owner)
            await run_batch(app, lines, partial(self._keep, journal), pace=self._runner.pace(), custom_ids=seen)

    async def _keep(self, journal: BinaryIO, result: bytes) -> None:
        if self._runner.is_draining:
            raise asyncio.CancelledError  # what ends from now on may have been aborted
        self._num_left_bytes -= len(result)
        if self._num_left_bytes < 0:
            raise _QuotaExceededError
        await self._store.in_thread(_write, journal, result)
        has_failed = not result.endswith(b'"error":null}\n')
        self._batch.failed += has_failed
        self._batch.completed += not has_failed

    async def _watch(self, answering: asyncio.Task[None]) -> str:
        """Wait for the end of all lines, of the time, or a cancellation, and publish the counts meanwhile."""
        batch, published = self._batch, -1
        while True:
            done, _ = await asyncio.wait((answering,), timeout=POLL_SECONDS)
            if await self._store.in_thread(self._batches.is_cancelled, batch.id):
                batch.status = "cancelling"
                batch.times.setdefault("cancelling", int(self._store.clock()))
                return "cancelled"
            if done:
                try:
                    answering.result()
                except _QuotaExceededError:
                    return QUOTA_EXCEEDED
                return "completed"
            if self._store.clock() >= batch.expires_at:
                return "expired"
            if batch.completed + batch.failed != published:
                published = batch.completed + batch.failed
                await self._store.in_thread(self._batches.write, batch)
                self._num_left_bytes = await self._store.in_thread(self._room)  # uploads take some

    async def _finalize(self) -> None:
        """Write the files of results, under ids fixed before: after a crash they are written again."""
        batch = self._batch
        if not batch.output_id:
            batch.output_id, batch.error_id = self._store.new_id("file-"), self._store.new_id("file-")
        await self._enter("finalizing")
        journal = self._batches.path(batch.id, "journal")
        answered = await self._store.in_thread(partial(read_answered, journal, is_ours=True))
        self._recount(answered)
        split = await self._store.in_thread(self._split, answered)
        batch.output_id, batch.error_id = split
        if batch.outcome == QUOTA_EXCEEDED:
            batch.failed = batch.total - batch.completed
        await self._enter("completed" if batch.outcome == QUOTA_EXCEEDED else batch.outcome)
        await self._store.in_thread(self._batches.clear, batch.id)

    def _split(self, answered: list[AnsweredLine]) -> tuple[str, str]:
        batch, path = self._batch, self._batches.path
        source = path(batch.id, "input")
        rest: Iterator[bytes] = iter(())
        if batch.outcome != "completed" and batch.total:  # only a checked file has lines of limited length
            rest = undone(batch.id, source, answered, batch.outcome)
        return split_journal(self._space, batch, path(batch.id, "journal"), rest)


class _QuotaExceededError(Exception):
    """The key's files may not grow any more."""


def _append_to(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")


def _check_room(journal: Path) -> None:
    with _append_to(journal) as file:
        length = file.tell()
        try:
            file.write(bytes(PROBE_BYTES))
            file.flush()
        finally:
            os.ftruncate(file.fileno(), length)


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()


async def _on_threads(store: FileStore, lines: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    while (line := await store.in_thread(next, lines, None)) is not None:
        yield line


def _retry_after(answer: httpx.Response) -> float | None:
    if answer.status_code not in _RETRIED:
        return None
    given = answer.headers.get("retry-after", "1")
    seconds = float(given) if given.isdigit() else 1.0
    return min(seconds, MOST_RETRY_SECONDS)
