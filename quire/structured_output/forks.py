"""Forks of the fork server, which end with it and collect no garbage."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from quire.utils.process_name import name_process

_PR_SET_PDEATHSIG = 1
"""Option of prctl(2)."""
_PAGE = resource.getpagesize()


def fork(name: str, work: Callable[[], None], stack: int) -> int:
    """Fork this single-threaded process; returns the child's id. The child does `work` on a thread with `stack` bytes
    of stack, and ends. name: at most 15 bytes, shown in lists of processes."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        gc.disable()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        name_process(name)
        if os.getppid() == parent:
            run_with_stack(work, stack)
            status = 0
    except BaseException:  # a fork never returns into the code of its parent
        traceback.print_exc()
    finally:
        os._exit(status)


def run_with_stack(work: Callable[[], None], stack: int) -> None:
    threading.stack_size(stack)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def limit(kind: int, value: int) -> None:
    """Lower a limit of this fork (`resource.RLIMIT_...`)."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def limit_memory(more: int) -> None:
    """Limit the address space to `more` bytes above its present size, on Linux."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit(resource.RLIMIT_AS, pages * _PAGE + more)


def be_silent(*descriptors: int) -> None:
    """Redirect a fork's output to /dev/null."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor)
    os.close(nothing)
