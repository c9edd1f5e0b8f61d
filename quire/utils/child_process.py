"""Processes of one engine: fresh interpreters that end with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
"""Option of prctl(2)."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from quire.utils.process_name import name_process; "
    "name_process(sys.argv[2]); from {module} import main; main()"
)


def start_interpreter(module: str, name: str, line: bytes, fds: Collection[int]) -> subprocess.Popen[bytes]:
    """Start `module`'s main() in a fresh interpreter with our search path, in its own process group. name: shown at the
    end of the command line, and its first 15 bytes in `top`. line: first line on standard input, which stays open while
    we live. fds: inherited files."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT.format(module=module), json.dumps([str(each) for each in sys.path]), name],
        stdin=subprocess.PIPE,
        pass_fds=tuple(fds),
        process_group=0,
    )
    write_line(process, line)
    return process


def write_line(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Write another line to a process's standard input; it may have ended."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended already: the caller notices by what it waits for
        process.stdin.write(line + b"\n")
        process.stdin.flush()


def kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children at once, wait for it and close its standard input. Idempotent."""
    assert process.stdin is not None
    with contextlib.ExitStack() as stack:
        children = [] if process.poll() is not None else _children(process.pid, stack)
        process.kill()
        process.wait()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)
    with contextlib.suppress(BrokenPipeError):  # a line that it never read
        process.stdin.close()


def _children(parent: int, stack: contextlib.ExitStack) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat") if hasattr(os, "pidfd_open") else ():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            descriptor = os.pidfd_open(int(path.parent.name))
            stack.callback(os.close, descriptor)
            if int(path.read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                found.append(descriptor)
    return found


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """True for a stopped process (SIGSTOP), False for an ended one."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def wait_or_kill(process: subprocess.Popen[bytes], timeout: float) -> None:
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def describe_exit(status: int) -> str:
    """Text such as "exited with ..." or "was killed by signal ..."."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-status} ({name})"


def watch_parent(last_act: Callable[[], None]) -> None:
    """End this process, after `last_act`, when the parent's end closes standard input."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)

    def watch() -> None:
        try:
            while os.read(0, 4096):
                pass
        finally:  # also when the pipe cannot be read: a process must not outlive its parent unnoticed
            last_act()
            os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
