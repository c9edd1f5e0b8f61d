"""The interpreter that tests/warm_interpreters.py copies."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import msgspec

from quire.utils import child_process
from quire.utils.process_name import name_process

IMPORTED = (
    *("quire.engine.process", "quire.executors.local", "quire.executors.rank", "quire.models.native"),
    *("quire.parallel.choice", "quire.parallel.shared_memory", "quire.parallel.torch_dist", "quire.sampling.sampler"),
    *("quire.sampling.native_kernels", "quire.worker.platform.cpu", "quire.worker.platform.native_columns"),
    *("quire.attention.native_backend", "quire.attention.native_encoder", "quire.attention.torch_backend"),
    *("quire.quantization.merge", "quire.quantization.packed", "quire.models.loader", "quire.models.gguf.sizes"),
)
"""Most of what ranks and engines import."""
_ABOVE_ALL = 400
"""Added to the numbers of a copy's files, before they get those that they have in the process that asks."""


class Copy(subprocess.Popen[Any]):
    """A process that is started in another way than by fork and exec."""

    def __init__(self, start: Callable[[int, int, int], int], **keywords: Any) -> None:
        """start: files that the process has as standard input, output and error -> process id. keywords: Popen's."""
        self._start = start
        super().__init__(["copy"], stdin=subprocess.PIPE, **keywords)

    def _execute_child(self, *arguments: Any) -> None:
        """Six arguments are pipes: what the child has of each, and what this process has; -1 where there is none."""
        pipes = arguments[10:16]
        try:
            read, write, error = pipes[0], pipes[3], pipes[5]
            self.pid = self._start(read, 1 if write == -1 else write, 2 if error == -1 else error)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class Asked(msgspec.Struct):
    """Request for a copy. numbers: of its files, in the order in which they are sent. ignored: signals. in_session:
    True for a new session, without a terminal."""

    module: str
    name: str
    numbers: list[int]
    environment: dict[str, str]
    directory: str
    ignored: list[int]
    in_session: bool = False

    @classmethod
    def here(cls, module: str, name: str, fds: Collection[int]) -> Asked:
        """With this process's environment and directory, and without the signals that it ignores."""
        ignored = [int(each) for each in signal.valid_signals() if signal.getsignal(each) == signal.SIG_IGN]
        return cls(module, name, [0, 1, 2, *fds], dict(os.environ), os.getcwd(), ignored)


def serve(number: int, modules: Collection[str]) -> None:
    """Make copies until the socket closes. number: the socket's. modules: imported before."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    copy_children()
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    asking = socket.socket(fileno=number)
    while True:
        message, fds, _, _ = socket.recv_fds(asking, 2**18, 256)
        if not message:
            return
        asker, (read, write) = os.getppid(), os.pipe()
        files = _open_files()
        between = os.fork()
        if between == 0:
            os.close(read)
            copy = os.fork()
            if copy == 0:
                os.close(write)
                _run(msgspec.json.decode(message, type=Asked), fds, files, asker)
            os.write(write, struct.pack("i", copy))
            os._exit(0)
        os.close(write)
        (pid,) = struct.unpack("i", os.read(read, 4))
        os.waitpid(between, 0)  # its child is the asker's now
        for each in (read, *fds):
            os.close(each)
        asking.send(str(pid).encode())


def copy_children(*modules: str) -> None:
    """From now on processes that this one starts are copies of it. Call it before Quire's modules are imported.
    modules: what the copies need, imported here once."""
    child_process.start_interpreter = _start
    for name in modules:
        importlib.import_module(name)


def _start(module: str, name: str, line: bytes, fds: Collection[int]) -> subprocess.Popen[bytes]:
    """In place of `child_process.start_interpreter`."""

    def start(*standard: int) -> int:
        asked, asker, files = Asked.here(module, name, fds), os.getpid(), _open_files()
        pid = os.fork()
        if pid == 0:
            _run(asked, [*standard, *fds], files, asker)
        return pid

    process = Copy(start)
    child_process.write_line(process, line)
    return process


def _forget_the_asker(ignored: Collection[int]) -> None:
    """What a process that has run before was told: signals, log records. What it leaves behind is not freed here, since
    the numbers of its files will have other owners. ignored: signals that stay so, as behind an exec."""
    gc.freeze()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number in ignored:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) != signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger("quire").handlers.clear()


def _open_files() -> dict[int, str]:
    """Number -> file."""
    found = {}
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(each)] = os.readlink(f"/proc/self/fd/{each}")
    return found


def _run(asked: Asked, fds: list[int], files: dict[int, str], asker: int) -> NoReturn:
    """Run a module's main() in this copy, and end. fds: its files, as this process has them. files: the asker's, which
    it closes; what libraries have opened again in this process (libuv a pipe) stays."""
    status = 1
    try:
        while os.getppid() != asker:
            time.sleep(0.001)
        if asked.in_session:
            os.setsid()
        else:
            os.setpgid(0, 0)
        _forget_the_asker(asked.ignored)
        numbers = asked.numbers
        high = [fcntl.fcntl(each, fcntl.F_DUPFD, _ABOVE_ALL + max(numbers)) for each in fds]
        for each, wanted in zip(high, numbers, strict=True):
            os.dup2(each, wanted)
        for each, file in _open_files().items():
            if each >= _ABOVE_ALL or (each not in numbers and files.get(each) == file):
                with contextlib.suppress(OSError):
                    os.close(each)
        sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", 1, closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
        name_process(asked.name)
        os.environ.clear()
        os.environ.update(asked.environment)
        os.chdir(asked.directory)
        gc.enable()
        importlib.import_module(asked.module).main()
        status = 0
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
