"""Ranks and engines of tests that ask for tokens, not for a start: copies of one interpreter that has imported torch.

A rank and an engine are fresh interpreters, of which each takes seconds of a processor for the imports alone. A warm
interpreter imports them once, has one thread, and forks what it is asked for: with the files, environment and
directory of the process that asks, and as its child, which it can kill, stop and wait for as one that it started.
Their modules and the name at the end of the command line are all that differs. The tests of starts and of what an
interpreter imports do without.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import msgspec
import pytest

from quire.engine import engine_process
from quire.executors import multiprocess
from quire.structured_output import service
from quire.tokenization import helpers
from quire.utils import child_process
from tests.copied_interpreter import IMPORTED, Asked, Copy

READ_BY_IMPORTS = ("CUDA", "GOMP_", "KMP_", "LD_", "MKL_", "NUMPY", "OMP_", "OPENBLAS", "PYTHON", "TORCH", "TRITON_")
"""Beginnings of the variables that a copy cannot have otherwise than the warm interpreter: with another value of them a
fresh interpreter is started. It gets all others from the process that asks."""
_PR_SET_CHILD_SUBREAPER = 36
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tests.copied_interpreter import serve; serve(int(sys.argv[2]), json.loads(sys.argv[3]))"
)


@contextlib.contextmanager
def _started_by(
    start: Callable[[str, str, bytes, Collection[int]], subprocess.Popen[bytes]],
    starters: Collection[ModuleType] = (multiprocess, engine_process),
) -> Iterator[None]:
    """starters: modules that start processes."""
    with pytest.MonkeyPatch.context() as patch:
        for each in starters:
            patch.setattr(each, "start_interpreter", start)
        yield


def fresh_ones() -> contextlib.AbstractContextManager[None]:
    """Ranks and engines that this process starts are fresh interpreters again."""
    return _started_by(child_process.start_interpreter)


class WarmInterpreter:
    """Starts copies in place of `child_process.start_interpreter`, and servers. modules: imported once."""

    def __init__(self, modules: Collection[str] = IMPORTED) -> None:
        self._modules = modules
        self._turn = threading.Lock()
        self._environment: dict[str, str] | None = None
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def in_place_of_fresh_ones(self) -> contextlib.AbstractContextManager[None]:
        """Ranks and engines that this process starts are copies."""
        return _started_by(self.start)

    def start(self, module: str, name: str, line: bytes, fds: Collection[int]) -> subprocess.Popen[bytes]:
        if not self.is_here():
            return child_process.start_interpreter(module, name, line, fds)
        process = self.start_copy(Asked.here(module, name, fds))
        child_process.write_line(process, line)
        return process

    def is_here(self) -> bool:
        """Begin where it has not. False where a copy would have imported with other variables than this process has."""
        with self._turn:
            self._process = self._process or self._begin()
        return _environment_of_imports() == self._environment

    def start_copy(self, asked: Asked, **keywords: Any) -> subprocess.Popen[Any]:
        """keywords: Popen's, of its output and error."""
        return Copy(partial(self._copy, asked), **keywords)

    def _begin(self) -> subprocess.Popen[bytes]:
        self._environment = _environment_of_imports()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = json.dumps([str(each) for each in sys.path]), str(theirs.fileno()), json.dumps(self._modules)
        with theirs:
            return subprocess.Popen((sys.executable, "-P", "-c", _BOOT, *arguments), pass_fds=[theirs.fileno()])

    def _copy(self, asked: Asked, *standard: int) -> int:
        """Process id of a new child of this process."""
        assert self._socket is not None
        with self._turn:
            _become_subreaper(True)
            try:
                fds = [*standard, *asked.numbers[len(standard) :]]
                socket.send_fds(self._socket, [msgspec.json.encode(asked)], fds)
                answer = self._socket.recv(64)
            finally:
                _become_subreaper(False)
        assert answer, "the warm interpreter has ended"
        return int(answer)

    def close(self) -> None:
        if self._process is not None and self._socket is not None:
            self._socket.close()
            self._process.wait()
            self._process = None


SERVERS = WarmInterpreter(
    (
        *("quire.engine.process", "quire.server.run", "quire.server.app", "quire.server.http_protocol"),
        *("tests.server.served_process", "tests.server.executor"),
    )
)
"""Its copies are servers, and their engines, of tests that ask nothing of a start."""
HELPERS = WarmInterpreter(("quire.tokenization.helper_process", "quire.structured_output.fork_server"))
"""Its copies are processes that tokenise and that make masks."""


def copied_helpers() -> contextlib.AbstractContextManager[None]:
    """What tokenises and makes masks for engines of this process are copies."""
    return _started_by(HELPERS.start, (helpers, service))


def close_interpreters() -> None:
    """Behind the last test."""
    for each in (SERVERS, HELPERS):
        each.close()


def _environment_of_imports() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ_BY_IMPORTS)}


def _become_subreaper(is_one: bool) -> None:
    """Get the orphans below this process as its children, or leave them to init."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_one), 0, 0, 0)
