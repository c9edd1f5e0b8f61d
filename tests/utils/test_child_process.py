"""Processes that an engine starts for itself end, and their children with them."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from quire.utils.child_process import is_stopped, kill, start_interpreter, write_line
from quire.utils.process_name import MAX_BYTES
from tests.architecture.source import modules
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


def test_a_process_that_died_before_it_read_is_closed() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
    process.wait()
    write_line(process, b"a line")
    kill(process)
    assert process.stdin is not None
    assert process.stdin.closed


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


def test_a_process_has_its_name_where_processes_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named.py").write_text("def main():\n    input()\n    input()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    process = start_interpreter("named", "quire: engine", b"", ())
    try:
        found = psutil.Process(process.pid)
        deadline = time.monotonic() + 60
        while found.name() != "quire: engine" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found.name() == "quire: engine"
        assert found.cmdline()[-1] == "quire: engine"
    finally:
        kill(process)


def test_names_fit_into_what_linux_keeps() -> None:
    """Of every module that starts a process."""
    texts = (module.path.read_text() for module in modules())
    trees = [ast.parse(text) for text in texts if re.search(r"\b(start_interpreter|fork)\(", text)]
    calls = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    starts = [node for node in calls if ast.unparse(node.func) in ("start_interpreter", "fork")]
    names = [text for node in starts for text in re.findall(r"quire: [\w {}]+", ast.unparse(node))]
    assert len(names) == 7
    assert all(len(re.sub(r"{.*}", "999", name)) <= MAX_BYTES for name in names)
