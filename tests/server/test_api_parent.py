"""The parent of API processes while the system has no room for another process: fake processes, a fake engine."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire import envs
from quire.config.options import EngineOptions
from quire.server import api_processes
from quire.server.api_process import NUMBERS_FILE, Serving
from quire.server.listener import bind
from quire.server.report import StartReport
from quire.server.settings import ServerSettings
from quire.utils.runtime_directory import RuntimeDirectory
from quire.utils.shared_numbers import Numbers

COUNT = 2
GUARD_SECONDS = 60


class Engine:
    ready = SimpleNamespace(seconds={}, backend="none")
    failure = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self.sessions: set[int] = set()
        self._last = 0

    def open_session(self) -> int:
        self._last += 1
        self.sessions.add(self._last)
        return self._last

    def close_session(self, number: int) -> None:
        self.sessions.remove(number)

    def start(self) -> None: ...

    def tell(self) -> None: ...

    def shutdown(self) -> None: ...


class Starts:
    """Starts of API processes, which sleep; each of `errors` fails one of them."""

    def __init__(self) -> None:
        self.errors: list[OSError] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, _module: str, _name: str, _line: bytes, fds: Collection[int]) -> subprocess.Popen[bytes]:
        if self.errors:
            raise self.errors.pop()
        [descriptor] = fds
        with socket.socket(fileno=os.dup(descriptor)) as control:
            control.send(msgspec.msgpack.encode(Serving()))
        process = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE, pass_fds=tuple(fds))
        self.processes.append(process)
        return process


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(GUARD_SECONDS):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM])
async def test_a_process_that_cannot_be_forked_for_a_moment_is_started_later(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts()
    monkeypatch.setattr(api_processes, "SharedEngine", Engine)
    monkeypatch.setattr(api_processes, "start_interpreter", starts)
    monkeypatch.setattr(api_processes, "RETRY_SECONDS", 0.0)
    options, settings = EngineOptions(), ServerSettings(port=0, api_server_count=COUNT)
    directory = RuntimeDirectory.create(envs.runtime_directory())
    numbers = Numbers.create(directory.path / NUMBERS_FILE, COUNT + 1)
    with bind(settings) as listener:
        fleet: Any = None
        parent = api_processes._Parent(options, settings, listener, directory, numbers, fleet)
        engine: Any = parent._engine
        serving = asyncio.ensure_future(parent.supervise(StartReport(), ["name"]))
        try:
            await until(lambda: parent._has_begun)
            starts.errors = [OSError(code, os.strerror(code)) for _ in range(3)]
            starts.processes[0].kill()
            await until(lambda: len(starts.processes) > COUNT and parent._serves)
            assert not starts.errors
            assert len(parent._processes) == len(engine.sessions) == COUNT
            assert not serving.done()
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            parent.close()
            directory.remove()
