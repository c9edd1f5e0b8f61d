"""One of several API processes: an HTTP server whose parent has the listening socket and the engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.engine.messages import EngineFailed
from quire.engine.shared_client import SharedClient
from quire.engine.shared_state import SharedState
from quire.errors import EngineDeadError, QuireError, UserError
from quire.logging import configure_logging, get_logger
from quire.server.keys import KeyRing
from quire.server.lifecycle import SHUTDOWN_GRACE_SECONDS, loop_factory, preload, read_prefixes
from quire.server.report import StartReport
from quire.server.settings import ServerSettings
from quire.server.shared_adapters import SharedAdapters
from quire.server.shared_pictures import ParentsNames
from quire.server.shared_responses import ParentsResponses
from quire.utils.child_process import watch_parent
from quire.utils.failures import explain
from quire.utils.open_files import make_room_for_connections
from quire.utils.runtime_directory import RuntimeDirectory
from quire.utils.shared_numbers import Numbers

if TYPE_CHECKING:
    from quire.server.context import ServerContext
    from quire.server.http_protocol import HttpServer

logger = get_logger(__name__)

NUMBERS_FILE = "numbers"
KEYS_FILE = "keys"
"""Copy of the key file, so all processes read the same keys."""
TICK_SECONDS = 0.1
PACKET_BYTES = 65536


class ApiLaunch(msgspec.Struct):
    """Launch message: line of JSON on standard input, which stays open while the parent lives. settings: this process's
    share. slot: in the shared numbers. preloads: register the prefixes of `preload_prefix`."""

    options: EngineOptions
    settings: ServerSettings
    directory: str
    session: int
    slot: int
    num_slots: int
    control_fd: int
    preloads: bool


class Connection(msgspec.Struct, tag="connection", array_like=True):
    """Parent's message of an accepted connection, sent with its descriptor."""


class Drain(msgspec.Struct, tag="drain", array_like=True):
    """Parent's order to refuse new requests, and to reply `Drained` when none is left or `seconds` have passed."""

    seconds: float


class Leave(msgspec.Struct, tag="leave", array_like=True):
    """Parent's order to close connections and exit."""


class Serving(msgspec.Struct, tag="serving", array_like=True):
    """Message to the parent: ready for connections."""


class Drained(msgspec.Struct, tag="drained", array_like=True):
    """Message to the parent: no request is left."""


ToProcess = Connection | Drain | Leave
ToParent = Serving | Drained | EngineFailed
"""`EngineFailed` reports why the process cannot start."""


def main() -> None:
    # Ctrl-C and supervisors may signal every process of a group; the parent decides what it means.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return  # the parent ended before it sent the work
    launch = msgspec.json.decode(line, type=ApiLaunch)
    os.set_inheritable(launch.control_fd, False)
    control = socket.socket(fileno=launch.control_fd)
    directory = RuntimeDirectory.join(Path(launch.directory))
    watch_parent(directory.remove)
    status = 0
    try:
        configure_logging()
        serve(launch, control)
    except QuireError as error:
        param = error.param if isinstance(error, UserError) else None
        control.send(msgspec.msgpack.encode(EngineFailed(str(error), True, type(error).__name__, param)))
        status = 1
    except BaseException as error:
        logger.exception("an API process failed")
        control.send(msgspec.msgpack.encode(EngineFailed(f"an API process failed: {explain(error)}")))
        status = 1
    with contextlib.suppress(OSError):  # unwritten output is lost
        sys.stdout.flush()
    os._exit(status)  # nothing is left to save


def serve(launch: ApiLaunch, control: socket.socket) -> None:
    """Serve until the parent sends `Leave`."""
    from quire.server.app import Common, create_app
    from quire.server.http_protocol import make_http_server

    report = StartReport()
    directory, settings = Path(launch.directory), launch.settings
    numbers = Numbers.open(directory / NUMBERS_FILE, launch.num_slots, launch.slot)
    state = SharedState(numbers)
    client = SharedClient(directory, launch.session, state)
    engine = AsyncLLM.of_session(launch.options, client)
    try:
        keys = settings
        if settings.api_key_file is not None:
            keys = msgspec.structs.replace(settings, api_key_file=str(directory / KEYS_FILE))
        common = Common(
            numbers,
            lambda: KeyRing.of(keys, numbers),
            ParentsResponses(client),
            lambda: state.loads.pids,
            SharedAdapters.of(directory),
            ParentsNames(client),
        )
        app = create_app(engine, settings, common)
        limited = msgspec.structs.replace(settings, max_connections=make_room_for_connections(settings.max_connections))
        report.phase("start API process, wait for engine")
        report.engine_phases(engine.ready.seconds)
        app.state.context.start_seconds = report.seconds
        server = make_http_server(app, limited, shutdown_grace_seconds=SHUTDOWN_GRACE_SECONDS)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(app.state.context.adapters.load_at_start(settings))
            if launch.preloads:
                runner.run(preload(engine, read_prefixes(settings)))
            runner.run(_ServingProcess(engine, app.state.context, server, control, state).serve_connections())
        app.state.context.exit()
    finally:
        engine.shutdown()


class _ServingProcess:
    def __init__(
        self, engine: AsyncLLM, context: ServerContext, server: HttpServer, control: socket.socket, state: SharedState
    ) -> None:
        self._engine, self._context, self._server = engine, context, server
        self._control = control
        self._loads = state.loads
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_adopted = self._num_arriving = 0
        self._leaving = asyncio.Event()

    async def serve_connections(self) -> None:
        serving = asyncio.ensure_future(self._server.serve(sockets=[]))
        while not self._server.started:
            await asyncio.wait((serving,), timeout=0.01)
            if serving.done():
                serving.result()
                raise QuireError("the HTTP server did not start")
        # The objects of the start-up are never freed: collections can skip them.
        gc.collect()
        gc.freeze()
        self._context.start()
        self._control.setblocking(False)
        asyncio.get_running_loop().add_reader(self._control, self._hear)
        self._say(Serving())
        while not self._leaving.is_set():
            num_open = len(self._server.server_state.connections) + self._num_arriving
            self._loads.publish_connections(self._num_adopted - num_open)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._leaving.wait()
        self._context.close()
        self._server.should_exit = True
        await serving

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                packet, fds, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 1)
                if not packet:
                    return  # the parent is gone, which ends this process (`watch_parent`)
                match msgspec.msgpack.decode(packet, type=ToProcess):
                    case Connection():
                        self._start(self._adopt(socket.socket(fileno=fds[0])))
                    case Drain(seconds):
                        self._context.drain()
                        self._start(self._drain(seconds))
                    case Leave():
                        self._leaving.set()
                        return

    async def _adopt(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._num_adopted += 1
        self._num_arriving += 1
        try:
            await self._server.adopt(connection)
        finally:
            self._num_arriving -= 1

    async def _drain(self, seconds: float) -> None:
        with contextlib.suppress(EngineDeadError):  # the parent notices a dead engine itself
            await self._engine.drain(seconds)
        self._say(Drained())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _say(self, message: ToParent) -> None:
        self._control.send(msgspec.msgpack.encode(message))
