"""A server that runs as users run it: in a process of its own. It is a copy of an interpreter that has imported what it
needs, and so are its engines and API processes (tests/warm_interpreters.py); fresh ones are those of the command line's
tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.copied_interpreter import Asked
from tests.warm_interpreters import SERVERS

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
from tests.copied_interpreter import copy_children
copy_children("quire.engine.process", "quire.server.run", "tests.server.executor")
from quire.config.options import EngineOptions
from quire.server.run import serve
from quire.server.settings import ServerSettings
options, settings, executor = json.loads(sys.argv[1])
sys.exit(serve(EngineOptions(**options), ServerSettings(**settings), executor=executor))
"""
LONG = {"prompt": "abc", "max_tokens": 250, "stream": True}


class Process:
    """A server in a process of its own."""

    def __init__(
        self,
        model_path: Path,
        executor: str = "slow_between_signals",
        max_num_seqs: int = 4,
        *,
        stderr: int = subprocess.PIPE,
        data_parallel_size: int = 1,
        start_new_session: bool = False,
        is_fresh: bool = False,
        **settings: Any,
    ) -> None:
        """stderr: a descriptor in place of the pipe that `finish` reads. start_new_session: without a terminal.
        is_fresh: started as users start it, not copied."""
        options = {
            "model": str(model_path),
            "num_blocks_override": 64,
            "max_num_seqs": max_num_seqs,
            "data_parallel_size": data_parallel_size,
        }
        arguments = json.dumps([options, {"port": 0, **settings}, f"tests.server.executor:{executor}"])
        files = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
        self.popen: subprocess.Popen[str]
        if is_fresh or not SERVERS.is_here():
            command = [sys.executable, "-c", SCRIPT, arguments]
            self.popen = subprocess.Popen(command, cwd=ROOT, start_new_session=start_new_session, **files)
        else:
            asked = Asked.here("tests.server.served_process", "python", ())
            asked.directory, asked.in_session = str(ROOT), start_new_session
            self.popen = SERVERS.start_copy(asked, **files)
            assert self.popen.stdin is not None
            with self.popen.stdin as line:
                line.write(f"{arguments}\n")
            self.popen.stdin = None
        self.output = ""
        self.url = ""

    def wait_ready(self) -> Process:
        """Read the line that names the address."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert " serves " in line, self.popen.communicate()
        self.output = line
        self.url = line.split(" on ")[1].split()[0]
        return self

    @property
    def engine(self) -> psutil.Process:
        children = psutil.Process(self.popen.pid).children()
        [engine] = children if len(children) == 1 else [each for each in children if _name(each) == "quire: engine"]
        return engine

    @property
    def api_processes(self) -> list[psutil.Process]:
        """Where there are several, by slot."""
        children = psutil.Process(self.popen.pid).children()
        return sorted((each for each in children if _name(each).startswith("quire: api")), key=_name)

    def hurry(self) -> None:
        """From now on steps of `slow_between_signals` take no time."""
        self.engine.send_signal(signal.SIGUSR1)

    def slow_down(self) -> None:
        self.engine.send_signal(signal.SIGUSR2)

    def signal(self, number: int) -> None:
        os.kill(self.popen.pid, number)

    def finish(self) -> tuple[int, str]:
        """Exit status and standard error, once it has ended; the engine must be gone as well."""
        assert self.popen.stdout is not None
        self.output += self.popen.stdout.read()
        error = "" if self.popen.stderr is None else self.popen.stderr.read()
        self.popen.wait()
        assert "Traceback" not in error, error
        return self.popen.returncode, error


def _name(process: psutil.Process) -> str:
    """What `top` shows; empty for one that has ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""
