"""Processes that an engine starts for itself end, and their children with them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil

from quire.utils.child_process import is_stopped, kill
from tests.processes import has_ended

PARENT = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
os.kill(child.pid, signal.SIGSTOP)
print(child.pid, flush=True)
time.sleep(3600)
"""


def test_a_child_that_is_stopped_ends_with_its_parent() -> None:
    """Which it cannot notice. In a session of its own no signal of a terminal reaches it."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        while child.status() != psutil.STATUS_STOPPED:  # the signal takes effect when it is next to run
            time.sleep(0.01)
        kill(parent)
        assert has_ended(child)
        kill(parent)
    finally:
        parent.stdout.close()
        if child.is_running():
            child.kill()


def test_whether_a_process_stands_still() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        assert not is_stopped(process)
        process.send_signal(signal.SIGSTOP)
        while not is_stopped(process):
            time.sleep(0.01)
        assert is_stopped(process), "asking changes nothing"
        process.send_signal(signal.SIGCONT)
        while is_stopped(process):
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert not is_stopped(process)
