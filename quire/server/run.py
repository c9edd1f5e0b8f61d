"""`serve`: one engine and one HTTP server, from the start to the drain."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.engine.client import DEFAULT_EXECUTOR
from quire.errors import ConfigError, EngineDeadError, UserError
from quire.logging import set_log_format, tell
from quire.server.keys import KeyRing
from quire.server.report import StartReport
from quire.server.settings import ServerSettings
from quire.utils.open_files import make_room_for_connections
from quire.utils.text_files import read_text_file

if TYPE_CHECKING:
    import uvicorn

    from quire.server.context import ServerContext

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DEATH_POLL_SECONDS = 0.1
OBITUARY_SECONDS = 1.0
"""How long /health says 503 after the engine died, before the process exits."""
SHUTDOWN_GRACE_SECONDS = 2
"""What answers that are complete get to reach slow clients at the end."""


def serve(options: EngineOptions, settings: ServerSettings, *, executor: str = DEFAULT_EXECUTOR) -> int:
    """Serve until a signal comes or the engine dies; the return value is the exit status of the process.

    SIGTERM or SIGINT drains: /health turns 503, new requests are refused with 503, running ones finish within
    `shutdown_timeout` seconds or end with the finish reason "abort"; then 0 is returned. A second signal cuts that
    short (128 + its number). 1 means that the engine died; why is on standard error.
    Must run on the main thread. Raises ConfigError, ModelLoadError or InsufficientMemoryError when it cannot start.
    """
    report = StartReport()
    if settings.log_format is not None:
        set_log_format(settings.log_format)
    check_certificate(settings)
    KeyRing.of(settings)  # a wrong file is refused before the engine starts
    prefixes = read_prefixes(settings)
    with bind(settings) as listener, _interruptible():
        if settings.api_server_count > 1:
            from quire.server.api_processes import serve_with_processes

            return serve_with_processes(options, settings, listener, executor, report)
        engine = AsyncLLM.from_options(options, restart_engine=settings.restart_engine, executor=executor)
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
            url = url_of(settings, listener)
            try:
                with asyncio.Runner(loop_factory=loop_factory()) as runner:
                    if prefixes:
                        runner.run(preload(engine, prefixes))
                        report.phase("compute prefixes")
                    names, backend = app.state.context.model_names, engine.ready.backend
                    return runner.run(service.run(listener, lambda: report.show(names, url, backend)))
            finally:
                app.state.context.exit()
        finally:
            engine.shutdown()
            remove_socket(settings)


def read_prefixes(settings: ServerSettings) -> dict[str, str]:
    """The texts to be registered at the start, by path. Raises ConfigError for a file that is none."""
    return {path: read_text_file(path, param="preload_prefix") for path in settings.preload_prefix}


def remove_socket(settings: ServerSettings) -> None:
    """Of a server that listened on one in the file system."""
    if settings.uds is not None:
        Path(settings.uds).unlink(missing_ok=True)


async def preload(engine: AsyncLLM, prefixes: Mapping[str, str]) -> None:
    """Register the texts (by the files they come from). Raises ConfigError for one that cannot be."""
    for path, text in prefixes.items():
        try:
            await engine.register_prefix(text)
        except UserError as error:
            raise ConfigError(f"preload_prefix: {path}: {error.message}", param="preload_prefix") from None


class _Service:
    """The running server: signals, the engine's death, the drain."""

    def __init__(self, engine: AsyncLLM, context: ServerContext, server: uvicorn.Server) -> None:
        self._engine = engine
        self._context = context
        self._server = server
        self._signals: list[int] = []
        self._signalled = asyncio.Event()
        self._signalled_again = asyncio.Event()

    async def run(self, listener: socket.socket, announce: Callable[[], None]) -> int:
        """Serve on `listener`; call `announce` once requests are answered. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        try:
            while not self._server.started:
                await asyncio.wait((serving,), timeout=0.01)
                if serving.done():
                    serving.result()
                    raise ConfigError("the HTTP server did not start")
            announce()
            status = await self._until_over()
            self._context.close()
            self._server.should_exit = True
            await serving
            return status
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    async def _until_over(self) -> int:
        await first(self._signalled.wait(), self._death())
        if not self._signalled.is_set():
            error = self._engine.dead_error
            tell(f"error {error.error_id}: the engine died: {error}")
            self._context.draining = True
            await asyncio.sleep(OBITUARY_SECONDS)
            return 1
        self._context.draining = True
        tell(f"shutting down: {self._engine.num_unfinished} requests are running (a second signal leaves at once)")
        status = await first(self._drain(), self._leave_at_once())
        assert status is not None
        return status

    async def _drain(self) -> int:
        """Let the running requests end. An engine that leaves with nothing left to do (a signal to the whole process
        group reaches it too) is no failure.
        """
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


async def first(*works: Coroutine[Any, Any, int | bool | None]) -> int | None:
    """Run `works` side by side until one is done, and cancel the others. Returns its result."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def bind(settings: ServerSettings) -> socket.socket:
    """Bind the address before the model is loaded; clients cannot connect until the server listens.

    Raises ConfigError when the address is in use, not allowed or not ours.
    """
    if settings.uds is not None:
        return _bind_path(settings.uds)
    host, port = settings.host, settings.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on host {host!r}: {error.strerror}", param="host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is already in use", param="port") from None
        raise ConfigError(f"cannot listen on port {port} of {host}: {error.strerror}", param="port") from None
    return listener


def _bind_path(path: str) -> socket.socket:
    """A Unix socket that the user and the group of this process may call. A socket that an ended server left there is
    replaced; one on which a server listens is not."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket() and not _answers(path):
            Path(path).unlink()
        listener.bind(path)
        Path(path).chmod(0o660)
    except OSError as error:
        listener.close()
        reason = "it is already in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise ConfigError(f"cannot listen on uds {path}: {reason}", param="uds") from None
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(path) == 0


def url_of(settings: ServerSettings, listener: socket.socket) -> str:
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    return f"{settings.scheme}://{_host(settings.host)}:{listener.getsockname()[1]}"


def check_certificate(settings: ServerSettings) -> None:
    """Raise ConfigError when the certificate or its key cannot be used."""
    if settings.ssl_certfile is None:
        return
    import ssl

    try:
        # An empty password, so that an encrypted key is an error and not a question on the terminal.
        context = ssl.create_default_context()
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
        if settings.ssl_ciphers is not None:
            context.set_ciphers(settings.ssl_ciphers)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"ssl_certfile {settings.ssl_certfile} with ssl_keyfile {settings.ssl_keyfile}"
            f"{f' and ssl_ca_certs {settings.ssl_ca_certs}' if settings.ssl_ca_certs else ''}: {reason}",
            param="ssl_certfile",
        ) from None


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """While the engine starts, a signal unwinds the stack, so that the engine process is taken away."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


def _host(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
