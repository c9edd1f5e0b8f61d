"""Parent of several API processes: it owns the engine, and hands each connection to the process with the fewest
(docs/decisions/0099-one-ledger-of-requests.md)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import zmq

from quire import envs
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.engine.fleet import Fleet
from quire.engine.messages import EngineFailed
from quire.engine.open_fleet import open_fleet
from quire.engine.shared_engine import SharedEngine
from quire.engine.shared_state import SharedState
from quire.errors import EngineDeadError, QuireError, named_error
from quire.kv_cache.stats import EngineStats
from quire.logging import get_logger, tell
from quire.metrics.prometheus import StepTokens
from quire.multimodal.named import NamedPictures
from quire.server.api_process import (
    KEYS_FILE,
    NUMBERS_FILE,
    PACKET_BYTES,
    TICK_SECONDS,
    ApiLaunch,
    Connection,
    Drain,
    Drained,
    Leave,
    Serving,
    ToParent,
    ToProcess,
)
from quire.server.lifecycle import OBITUARY_SECONDS, SHUTDOWN_GRACE_SECONDS, ending_signals, loop_factory
from quire.server.listener import Listener
from quire.server.report import StartReport, tell_systemd
from quire.server.response_store import ResponseStore
from quire.server.settings import ServerSettings
from quire.server.shared_pictures import PICTURES, PictureService
from quire.server.shared_responses import SERVICE, ResponseService
from quire.server.stats_log import log_stats
from quire.utils.child_process import describe_exit, is_stopped, kill, start_interpreter, wait_or_kill
from quire.utils.runtime_directory import RuntimeDirectory
from quire.utils.shared_numbers import Numbers

logger = get_logger(__name__)

MAX_FAILED_STARTS = 3
"""Failed starts of replacement processes, in a row, before the server ends."""
MAX_ACCEPTED = 64
"""Connections accepted before other events are handled."""
EXIT_SECONDS = SHUTDOWN_GRACE_SECONDS + 3
STOPPED_TICKS = 50
"""Successive checks that find a process stopped (SIGSTOP) before it is replaced."""
RETRY_SECONDS = 1.0


def serve_with_processes(
    options: EngineOptions, settings: ServerSettings, listener: Listener, executor: str, report: StartReport
) -> int:
    """Like `quire.server.run.serve`, with `api_server_count` API processes."""
    config = resolve(options)
    directory = RuntimeDirectory.create(envs.runtime_directory())
    try:
        if settings.api_key_file is not None:
            (directory.path / KEYS_FILE).write_bytes(Path(settings.api_key_file).read_bytes())
        numbers = Numbers.create(directory.path / NUMBERS_FILE, settings.api_server_count + 1)
        timeout = settings.hung_engine_timeout
        fleet = open_fleet(options, executor, restarts=settings.restart_engine, hung_engine_timeout=timeout)
        parent = _Parent(options, settings, listener, directory, numbers, fleet)
        report.phase("launch engine process")
        names = settings.served_model_name or [config.model.name]
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                return runner.run(parent.supervise(report, names))
        finally:
            parent.close()
    finally:
        directory.remove()


@dataclass(slots=True)
class _Process:
    """API process as its parent sees it. num_given: connections handed over. num_stopped: successive checks that found
    it stopped."""

    slot: int
    session: int
    popen: subprocess.Popen[bytes]
    control: socket.socket
    is_serving: bool = False
    is_drained: bool = False
    num_given: int = 0
    num_stopped: int = 0

    def say(self, message: ToProcess) -> None:
        with contextlib.suppress(OSError):  # it has ended; reading `control` notices that
            self.control.send(msgspec.msgpack.encode(message))


class _Parent:
    def __init__(
        self,
        options: EngineOptions,
        settings: ServerSettings,
        listener: Listener,
        directory: RuntimeDirectory,
        numbers: Numbers,
        fleet: Fleet,
    ) -> None:
        self._options, self._settings = options, settings
        self._listener, self._accepting, self._directory = listener, listener.socket, directory
        state = SharedState(numbers)
        steps = StepTokens(numbers)
        self._stats = EngineStats()
        self._loads = state.loads
        self._loads.take_slot(settings.api_server_count, os.getpid())
        self._responses = ResponseService(ResponseStore(settings.max_stored_responses, settings.response_store_bytes))
        names = NamedPictures(int(options.mm_processor_cache_gb * 2**30))
        self._engine = SharedEngine(
            fleet,
            directory,
            state.engine,
            services={SERVICE: self._responses.answer, PICTURES: PictureService(names).answer},
            on_stats=partial(self._note_stats, steps),
            on_change=self._note_change,
        )
        self._processes: dict[int, _Process] = {}
        self._waiting: list[socket.socket] = []
        """Accepted connections that still need a process."""
        self._has_begun = self._is_draining = self._is_leaving = False
        self._num_failed_starts = 0
        self._failure: QuireError | None = None
        """Error that keeps API processes from starting."""
        self._signals: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    async def supervise(self, report: StartReport, model_names: list[str]) -> int:
        """Run until a signal comes, the engine dies or API processes cannot start. Returns the exit status; raises a
        failed start's error."""
        self._loop = asyncio.get_running_loop()
        numbers = ending_signals()
        for number in numbers:
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._engine.start()
        for slot in range(self._settings.api_server_count):
            self._start(slot, preloads=slot == 0)
        ticking = asyncio.ensure_future(self._tick())
        try:
            await self._until(lambda: bool(self._signals) or self._is_over or self._serves)
            if self._is_over:
                raise self._reason
            if self._signals:
                return 128 + self._signals[-1]
            assert self._engine.ready is not None
            report.phase("wait for engine and API processes")
            report.engine_phases(self._engine.ready.seconds)
            self._begin()
            report.show(model_names, self._listener.url, self._engine.ready.backend)
            tell_systemd("READY=1")
            with log_stats(self._settings, lambda: self._stats):
                await self._until(lambda: bool(self._signals) or self._is_over)
            tell_systemd("STOPPING=1")
            status = await (self._drain() if self._signals else self._tell_end())
            if len(self._signals) < 2:
                await self._leave()
            return status
        finally:
            ticking.cancel()
            for number in numbers:
                self._loop.remove_signal_handler(number)

    def close(self) -> None:
        for process in self._processes.values():
            kill(process.popen)
            process.control.close()
        for connection in self._waiting:
            connection.close()
        self._engine.shutdown()

    # Life of the service.

    @property
    def _serves(self) -> bool:
        return self._engine.ready is not None and all(process.is_serving for process in self._processes.values())

    @property
    def _is_over(self) -> bool:
        return self._failure is not None or self._engine.failure is not None

    @property
    def _reason(self) -> QuireError:
        failure = self._failure or self._engine.failure
        assert failure is not None
        return failure

    async def _until(self, is_so: Callable[[], bool], *, seconds: float | None = None) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_so():
                    self._changed.clear()
                    await self._changed.wait()
        return is_so()

    async def _tell_end(self) -> int:
        reason = self._reason
        if isinstance(reason, EngineDeadError):
            tell(f"error {reason.error_id}: the engine died: {reason}")
            await asyncio.sleep(OBITUARY_SECONDS)
        else:
            tell(f"error: {reason}")
        return 1

    async def _drain(self) -> int:
        self._is_draining = True
        assert self._loop is not None
        if self._listener.is_inherited:
            self._loop.remove_reader(self._accepting)  # new connections wait for the next server
        num_running = self._loads.num_unfinished
        tell(f"shutting down: {num_running} requests are running (a second signal leaves at once)")
        for process in self._processes.values():
            process.say(Drain(self._settings.shutdown_timeout))
        while not await self._until(self._is_drained_or_forced, seconds=TICK_SECONDS):
            if self._engine.failure is None:
                num_running = self._loads.num_unfinished
        if len(self._signals) > 1:
            return 128 + self._signals[-1]
        failure = self._engine.failure
        if isinstance(failure, EngineDeadError) and num_running:
            # An idle engine that ends is no failure: a signal to the whole group reaches it too.
            tell(f"error {failure.error_id}: the engine died while requests were running: {failure}")
            return 1
        return 0

    def _is_drained_or_forced(self) -> bool:
        return len(self._signals) > 1 or all(process.is_drained for process in self._processes.values())

    async def _leave(self) -> None:
        assert self._loop is not None
        self._is_leaving = True
        self._loop.remove_reader(self._accepting)
        self._accepting.close()
        for process in self._processes.values():
            process.say(Leave())
        await self._until(lambda: not self._processes or len(self._signals) > 1, seconds=EXIT_SECONDS)

    async def _tick(self) -> None:
        while True:
            self._engine.tell()
            self._hand_over()
            if not self._waiting:
                self._listen()
            for process in self._processes.values():
                process.num_stopped = process.num_stopped + 1 if is_stopped(process.popen) else 0
                if process.num_stopped == STOPPED_TICKS:
                    logger.error("API process %d is stopped (SIGSTOP), and is ended", process.slot)
                    process.popen.kill()
            await asyncio.sleep(TICK_SECONDS)

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        self._changed.set()

    def _note_stats(self, steps: StepTokens, stats: EngineStats) -> None:
        self._stats = stats
        steps.record(stats)

    def _note_change(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._changed.set)

    # Connections.

    def _begin(self) -> None:
        self._has_begun = True
        self._listener.listen()
        self._accepting.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        leaves_them = self._is_leaving or (self._is_draining and self._listener.is_inherited)
        if self._loop is not None and self._has_begun and not leaves_them:
            self._loop.add_reader(self._accepting, self._accept)

    def _accept(self) -> None:
        assert self._loop is not None
        try:
            while len(self._waiting) < MAX_ACCEPTED:
                self._waiting.append(self._accepting.accept()[0])
        except (BlockingIOError, ConnectionAbortedError):
            pass
        except OSError as error:
            self._loop.remove_reader(self._accepting)  # until the next tick; connections wait in the backlog
            logger.warning("no connections are accepted for a moment: %s", error)
        self._hand_over()
        if self._waiting:
            self._loop.remove_reader(self._accepting)

    def _hand_over(self) -> None:
        packet = [msgspec.msgpack.encode(Connection())]
        while self._waiting:
            for process in self._by_load():
                try:
                    socket.send_fds(process.control, packet, [self._waiting[0].fileno()])
                except OSError:
                    continue  # it has ended, or its socket is full
                process.num_given += 1
                self._waiting.pop(0).close()
                break
            else:
                return

    def _by_load(self) -> list[_Process]:
        serving = {process.slot: process.num_given for process in self._processes.values() if process.is_serving}
        return [self._processes[slot] for slot in self._loads.by_load(serving)]

    # Processes.

    def _start(self, slot: int, *, preloads: bool = False) -> None:
        assert self._loop is not None
        count = self._settings.api_server_count
        with contextlib.ExitStack() as undo:
            session = self._engine.open_session()
            undo.callback(self._engine.close_session, session)
            control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(control.close)
            with theirs:
                launch = ApiLaunch(
                    self._options,
                    share_of(self._settings, count),
                    str(self._directory.path),
                    session,
                    slot,
                    count + 1,
                    theirs.fileno(),
                    preloads,
                )
                popen = start_interpreter(
                    "quire.server.api_process", f"quire: api {slot}", msgspec.json.encode(launch), [theirs.fileno()]
                )
            undo.pop_all()
        control.setblocking(False)
        self._loads.take_slot(slot, popen.pid)
        process = self._processes[slot] = _Process(slot, session, popen, control)
        self._loop.add_reader(control, self._hear, process)

    def _hear(self, process: _Process) -> None:
        try:
            while packet := process.control.recv(PACKET_BYTES):
                match msgspec.msgpack.decode(packet, type=ToParent):
                    case Serving():
                        process.is_serving = True
                        self._num_failed_starts = 0
                        self._hand_over()
                    case Drained():
                        process.is_drained = True
                    case EngineFailed() as failed:
                        kind = failed.error_type if failed.is_user_error else QuireError.__name__
                        self._note_end(process, named_error(kind, failed.message, failed.param))
                        break
            else:
                self._note_end(process, None)
        except BlockingIOError:
            pass
        except OSError:
            self._note_end(process, None)
        self._changed.set()

    def _note_end(self, process: _Process, error: QuireError | None) -> None:
        """Replace a process that has ended, unless the server ends. error: its own report."""
        assert self._loop is not None
        self._loop.remove_reader(process.control)
        process.control.close()
        wait_or_kill(process.popen, EXIT_SECONDS)
        kill(process.popen)
        del self._processes[process.slot]
        self._responses.end_session(process.session)
        self._engine.close_session(process.session)
        self._loads.take_slot(process.slot, 0)
        if self._is_leaving or self._is_over:
            return
        error = error or QuireError(f"API process {process.slot} {describe_exit(process.popen.returncode)}")
        if not self._has_begun:
            self._failure = error
            return
        if not process.is_serving:
            self._num_failed_starts += 1
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                self._failure = QuireError(f"API processes cannot be started any more: {error}")
                return
        if not self._is_draining:
            logger.warning("%s; another one is started", error)
            self._replace(process.slot)

    def _replace(self, slot: int) -> None:
        if self._is_draining or self._is_leaving or self._is_over:
            return
        assert self._loop is not None
        try:
            self._start(slot)
        except (OSError, zmq.ZMQError) as error:  # no memory or descriptors for a moment
            logger.warning("API process %d cannot be started for now: %s", slot, error)
            self._loop.call_later(RETRY_SECONDS, self._replace, slot)


def share_of(settings: ServerSettings, count: int) -> ServerSettings:
    """Settings of one of `count` processes, with its share of the server's limits."""
    return msgspec.structs.replace(
        settings,
        max_connections=-(-settings.max_connections // count),
        max_total_body_size=max(settings.max_total_body_bytes // count, settings.max_body_bytes),
    )
