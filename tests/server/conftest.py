"""Engines over the fake executor, and two ways to talk to their server: in-process, and over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from quire.config.options import EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.engine.inprocess_client import InProcessClient
from quire.server.app import create_app
from quire.server.context import ServerContext
from quire.server.http_protocol import HttpServer, make_http_server
from quire.server.listener import bind
from quire.server.settings import ServerSettings
from quire.utils.heartbeat import SILENCE_LIMIT
from tests.fakes.executor import FakeExecutor
from tests.server.model_directory import write_model
from tests.server.serve_process import Process
from tests.warm_interpreters import SERVERS

NUM_BLOCKS = 64
HOST = "quire"
"""The name that tests call servers by."""


@pytest.fixture(scope="module", autouse=True)
def processes_of_engines(copied_helpers: None) -> None:
    """Those that tokenise and make masks are copies."""


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@dataclass
class Served:
    """A server and a client of it."""

    engine: AsyncLLM
    context: ServerContext
    client: httpx.AsyncClient
    url: str = f"http://{HOST}"
    app: FastAPI | None = None
    server: HttpServer | None = None

    async def until_idle(self) -> None:
        """Wait until nothing runs or waits and every block is free."""
        while True:
            stats = await self.engine.stats()
            if self.engine.num_unfinished == stats.num_running == stats.num_waiting == stats.num_used_blocks == 0:
                return
            await asyncio.sleep(0.005)

    def hurry(self) -> None:
        """Steps of an engine in this process take no time any more."""
        client = self.engine._session.client
        assert isinstance(client, InProcessClient)
        executor = client._core._executor
        assert isinstance(executor, FakeExecutor)
        executor.hurry.set()

    async def until_running(self, count: int) -> None:
        while (await self.engine.stats()).num_running < count:
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving_apart(
    model_path: Path,
    *,
    max_num_seqs: int,
    restart_engine: bool | None = None,
    executor: str = "slow",
    data_parallel_size: int = 1,
) -> AsyncIterator[Served]:
    """The application over engines in processes of their own (copies), slow enough to be met at work."""
    options = EngineOptions(
        model=str(model_path),
        num_blocks_override=128,
        max_num_seqs=max_num_seqs,
        data_parallel_size=data_parallel_size,
    )
    with SERVERS.in_place_of_fresh_ones():
        engine = AsyncLLM.from_options(
            options,
            restart_engine=restart_engine,
            hung_engine_timeout=SILENCE_LIMIT,
            executor=f"tests.server.executor:{executor}",
        )
        try:
            settings = ServerSettings(served_model_name=["tiny"], allowed_hosts=[HOST], enable_admin_routes=True)
            app = create_app(engine, settings)
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://quire") as client:
                yield Served(engine, app.state.context, client)
        finally:
            engine.shutdown()


@contextlib.asynccontextmanager
async def serving(
    model_path: Path,
    settings: ServerSettings | None = None,
    *,
    executor: str = "readable",
    live: bool = False,
    max_num_seqs: int = 8,
    scheduling_policy: str = "fcfs",
    chat_template: str | None = None,
    structured_outputs_config: dict[str, object] | None = None,
) -> AsyncIterator[Served]:
    """Serve the tiny model; `live`: over 127.0.0.1 or the settings' Unix socket, else the client calls the application
    directly."""
    settings = settings or ServerSettings(served_model_name=["tiny"], port=0)
    if settings.uds is None:
        settings = msgspec.structs.replace(settings, allowed_hosts=[*settings.allowed_hosts, HOST])
    options = EngineOptions(
        model=str(model_path),
        num_blocks_override=NUM_BLOCKS,
        max_num_seqs=max_num_seqs,
        scheduling_policy=scheduling_policy,
        chat_template=chat_template,
        structured_outputs_config=structured_outputs_config,
    )
    engine = AsyncLLM.from_options(options, in_process=True, executor=f"tests.server.executor:{executor}")
    try:
        app = create_app(engine, settings)
        if not live:
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
                yield Served(engine, app.state.context, client, app=app)
            return
        server = make_http_server(app, settings, shutdown_grace_seconds=2)
        with bind(settings) as listener:
            url = f"http://{HOST}" if settings.uds else f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
            running = asyncio.ensure_future(server.serve(sockets=[listener.socket]))
            while not server.started:
                await asyncio.sleep(0.005)
            socket = httpx.AsyncHTTPTransport(uds=settings.uds) if settings.uds else None
            async with httpx.AsyncClient(base_url=url, timeout=60, transport=socket) as client:
                yield Served(engine, app.state.context, client, url, app, server)
            server.should_exit = True
            await running
    finally:
        engine.shutdown()


@pytest.fixture
async def served(model_path: Path) -> AsyncIterator[Served]:
    """The application called directly."""
    async with serving(model_path) as served:
        yield served


@pytest.fixture
async def live(model_path: Path) -> AsyncIterator[Served]:
    """A server on a socket, whose steps take a while."""
    async with serving(model_path, executor="slow", live=True) as served:
        yield served


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    """Started servers, ended whatever happens."""
    started: list[Process] = []
    yield started
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.communicate()
