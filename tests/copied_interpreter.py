"""The interpreter that tests/warm_interpreters.py copies."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
import time
import traceback
from typing import Any

from quire.utils.process_name import name_process

IMPORTED = ("quire.executors.rank", "quire.executors.local", "quire.engine.process", "quire.worker.platform.choice")
_ABOVE_ALL = 400
"""Added to the numbers of a copy's files, before they get those that they have in the process that asks."""


def serve(number: int) -> None:
    """Make copies until the socket closes. number: the socket's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    asking = socket.socket(fileno=number)
    while True:
        message, fds, _, _ = socket.recv_fds(asking, 2**18, 256)
        if not message:
            return
        asker, (read, write) = os.getppid(), os.pipe()
        between = os.fork()
        if between == 0:
            os.close(read)
            copy = os.fork()
            if copy == 0:
                os.close(write)
                _run(json.loads(message), fds, asker)
            os.write(write, struct.pack("i", copy))
            os._exit(0)
        os.close(write)
        (pid,) = struct.unpack("i", os.read(read, 4))
        os.waitpid(between, 0)  # its child is the asker's now
        for each in (read, *fds):
            os.close(each)
        asking.send(str(pid).encode())


def _run(asked: dict[str, Any], fds: list[int], asker: int) -> None:
    """Run a module's main() in this copy, and end."""
    status = 1
    try:
        while os.getppid() != asker:
            time.sleep(0.001)
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        numbers = asked["numbers"]
        high = [fcntl.fcntl(each, fcntl.F_DUPFD, _ABOVE_ALL + max(numbers)) for each in fds]
        for each, wanted in zip(high, numbers, strict=True):
            os.dup2(each, wanted)
        for each in os.listdir("/proc/self/fd"):
            if int(each) not in numbers:
                with contextlib.suppress(OSError):
                    os.close(int(each))
        name_process(asked["name"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["directory"])
        gc.enable()
        importlib.import_module(asked["module"]).main()
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
