"""`serve`: one engine and one HTTP server, from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import msgspec

from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.engine.client import DEFAULT_EXECUTOR
from quire.engine.engine_process import EngineProcess
from quire.errors import ConfigError, EngineDeadError
from quire.logging import set_log_format, tell
from quire.server.file_store import claimed
from quire.server.keys import KeyRing
from quire.server.lifecycle import (
    OBITUARY_SECONDS,
    SHUTDOWN_GRACE_SECONDS,
    ending_signals,
    first,
    heed_hangups,
    loop_factory,
    preload,
    read_prefixes,
)
from quire.server.listener import Listener, bind, check_certificate
from quire.server.report import StartReport, tell_systemd
from quire.server.settings import ServerSettings
from quire.server.stats_log import log_stats
from quire.utils.open_files import make_room_for_connections
from quire.utils.streams import guard_streams

if TYPE_CHECKING:
    import uvicorn

    from quire.server.context import ServerContext

DEATH_POLL_SECONDS = 0.1


def serve(
    options: EngineOptions,
    settings: ServerSettings,
    *,
    executor: str = DEFAULT_EXECUTOR,
    process: EngineProcess | None = None,
) -> int:
    """Serve until a signal comes or the engine dies; return the exit status. SIGTERM, SIGINT or SIGHUP drains: new
    requests get 503; running ones finish within `shutdown_timeout` seconds or end with finish reason "abort" (status
    0). A second signal exits at once (128 + its number). Status 1: the engine died. process: see AsyncLLM.from_options.
    Main thread only. Raises ConfigError, ModelLoadError or InsufficientMemoryError."""
    report = StartReport()
    guard_streams("stdout", "stderr")
    if settings.log_format is not None:
        set_log_format(settings.log_format)
    check_certificate(settings)
    heed_hangups(settings)
    KeyRing.of(settings)  # refuses a wrong file before the engine starts
    prefixes = read_prefixes(settings)
    with bind(settings) as listener, claimed(settings.files_path), _interruptible():
        settings = listener.settings
        report.announce(options.model)
        if settings.api_server_count > 1:
            from quire.server.api_processes import serve_with_processes

            return serve_with_processes(options, settings, listener, executor, report)
        engine = AsyncLLM.from_options(
            options,
            restart_engine=settings.restart_engine,
            hung_engine_timeout=settings.hung_engine_timeout,
            executor=executor,
            process=process,
        )
        report.phase("load tokenizer, launch engine process")
        try:
            # Only now, while the engine process is starting: importing the web framework takes as long as torch.
            from quire.server.app import create_app
            from quire.server.http_protocol import make_http_server

            report.phase("import web server")
            app = create_app(engine, settings)
            report.phase("wait for engine")
            report.engine_phases(engine.ready.seconds)
            num_connections = make_room_for_connections(settings.max_connections)
            limited = msgspec.structs.replace(settings, max_connections=num_connections)
            server = make_http_server(app, limited, shutdown_grace_seconds=SHUTDOWN_GRACE_SECONDS)
            service = _Service(engine, app.state.context, server)
            url = listener.url
            try:
                with asyncio.Runner(loop_factory=loop_factory()) as runner:
                    if settings.lora_modules or settings.lora_files:
                        runner.run(app.state.context.adapters.load_at_start(settings))
                        report.phase("load adapters")
                    if prefixes:
                        runner.run(preload(engine, prefixes))
                        report.phase("compute prefixes")
                    app.state.context.start_seconds = report.seconds
                    names, backend = app.state.context.model_names, engine.ready.backend
                    return runner.run(service.run(listener, lambda: report.show(names, url, backend)))
            finally:
                app.state.context.exit()
        finally:
            engine.shutdown()


class _Service:
    def __init__(self, engine: AsyncLLM, context: ServerContext, server: uvicorn.Server) -> None:
        self._engine = engine
        self._context = context
        self._server = server
        self._signals: list[int] = []
        self._signalled = asyncio.Event()
        self._signalled_again = asyncio.Event()

    async def run(self, listener: Listener, announce: Callable[[], None]) -> int:
        """Serve on `listener`; call `announce` once requests are answered. Returns the exit status. Raises as
        Listener.listen does."""
        listener.listen()
        loop = asyncio.get_running_loop()
        numbers = ending_signals()
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.ensure_future(self._server.serve(sockets=[listener.socket]))
        try:
            while not self._server.started:
                await asyncio.wait((serving,), timeout=0.01)
                if serving.done():
                    serving.result()
                    raise ConfigError("the HTTP server did not start")
            # The objects of the start-up are never freed: collections can skip them.
            gc.collect()
            gc.freeze()
            self._context.start()
            announce()
            tell_systemd("READY=1")
            with log_stats(self._context.settings, lambda: self._context.metrics.stats):
                status = await self._until_over(listener)
            self._context.close()
            self._server.should_exit = True
            await serving
            return status
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def _until_over(self, listener: Listener) -> int:
        await first(self._signalled.wait(), self._death())
        tell_systemd("STOPPING=1")
        if not self._signalled.is_set():
            error = self._engine.dead_error
            tell(f"error {error.error_id}: the engine died: {error}")
            self._context.drain()
            await asyncio.sleep(OBITUARY_SECONDS)
            return 1
        if listener.is_inherited:
            for accepting in self._server.servers:
                accepting.close()  # new connections wait for the next server
        self._context.drain()
        tell(f"shutting down: {self._engine.num_unfinished} requests are running (a second signal leaves at once)")
        status = await first(self._drain(), self._leave_at_once())
        assert status is not None
        return status

    async def _drain(self) -> int:
        busy = self._engine.num_unfinished > 0
        draining = asyncio.ensure_future(self._engine.drain(self._context.settings.shutdown_timeout))
        try:
            while not draining.done():
                await asyncio.wait((draining,), timeout=DEATH_POLL_SECONDS)
                if not self._engine.errored:
                    busy = self._engine.num_unfinished > 0
            draining.result()
        except EngineDeadError as error:
            if busy:
                tell(f"error {error.error_id}: the engine died while requests were running: {error}")
                return 1
        finally:
            draining.cancel()
        return 0

    async def _leave_at_once(self) -> int:
        await self._signalled_again.wait()
        self._server.force_exit = True
        return 128 + self._signals[-1]

    async def _death(self) -> None:
        while not self._engine.errored:
            await asyncio.sleep(DEATH_POLL_SECONDS)

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        (self._signalled_again if self._signalled.is_set() else self._signalled).set()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Unwind the stack on a signal during the start, which ends the engine process."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
