"""Ranks and engines of tests that ask for tokens, not for a start: copies of one interpreter that has imported torch.

A rank and an engine are fresh interpreters, of which each takes seconds of a processor for the imports alone. A warm
interpreter imports them once, has one thread, and forks what it is asked for: with the files, environment and
directory of the process that asks, and as its child, which it can kill, stop and wait for as one that it started.
Their modules, their search path and the name at the end of the command line are all that differs. The tests of starts
and of what an interpreter imports do without; so do processes that the copies start.
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
from typing import Any

import pytest

from quire.engine import engine_process
from quire.executors import multiprocess
from quire.utils import child_process

OWN = ("PYTEST_CURRENT_TEST", "QUIRE_")
"""Beginnings of variables that are read when a copy runs. With other differences a fresh interpreter is started."""
_PR_SET_CHILD_SUBREAPER = 36
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tests.copied_interpreter import serve; serve(int(sys.argv[2]))"
)


@contextlib.contextmanager
def _started_by(start: Callable[[str, str, bytes, Collection[int]], subprocess.Popen[bytes]]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocess, "start_interpreter", start)
        patch.setattr(engine_process, "start_interpreter", start)
        yield


def fresh_ones() -> contextlib.AbstractContextManager[None]:
    """Ranks and engines that this process starts are fresh interpreters again."""
    return _started_by(child_process.start_interpreter)


class WarmInterpreter:
    """Starts copies in place of `child_process.start_interpreter`."""

    def __init__(self) -> None:
        self._environment = _fixed_environment()
        self._turn = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-c", _BOOT, json.dumps([str(each) for each in sys.path])]
            self._process = subprocess.Popen([*command, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        self._socket = ours

    def in_place_of_fresh_ones(self) -> contextlib.AbstractContextManager[None]:
        """Ranks and engines that this process starts are copies."""
        return _started_by(self.start)

    def start(self, module: str, name: str, line: bytes, fds: Collection[int]) -> subprocess.Popen[bytes]:
        if _fixed_environment() != self._environment:
            return child_process.start_interpreter(module, name, line, fds)
        process = _Copy(self, module, name, tuple(fds))
        child_process.write_line(process, line)
        return process

    def copy(self, module: str, name: str, stdin: int, fds: Collection[int]) -> int:
        """Process id of a new child of this process."""
        numbers = [0, 1, 2, *fds]
        asked = {"module": module, "name": name, "numbers": numbers}
        asked |= {"environment": dict(os.environ), "directory": os.getcwd()}
        with self._turn:
            _become_subreaper(True)
            try:
                socket.send_fds(self._socket, [json.dumps(asked).encode()], [stdin, *numbers[1:]])
                answer = self._socket.recv(64)
            finally:
                _become_subreaper(False)
        assert answer, "the warm interpreter has ended"
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


class _Copy(subprocess.Popen[bytes]):
    def __init__(self, warm: WarmInterpreter, module: str, name: str, fds: tuple[int, ...]) -> None:
        self._warm, self._module, self._name, self._fds = warm, module, name, fds
        super().__init__([module], stdin=subprocess.PIPE)

    def _execute_child(self, *arguments: Any) -> None:
        """In place of fork and exec. The eleventh argument is the end of the pipe that the child reads."""
        stdin = arguments[10]
        try:
            self.pid = self._warm.copy(self._module, self._name, stdin, self._fds)
            self._child_created = True
        finally:
            os.close(stdin)


def _fixed_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(OWN)}


def _become_subreaper(is_one: bool) -> None:
    """Get the orphans below this process as its children, or leave them to init."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_one), 0, 0, 0)
