"""Interpreter that has imported Triton's compiler, which takes seconds of a processor. It forks for each run of a
module: Triton reads at its import whether kernels are interpreted, so pytest's own process cannot compile."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.architecture.source import ROOT

MODULES = (
    *(f"tests.kernels.triton.{name}" for name in ("ahead_of_time", "cached_launches", "contractions")),
    "tests.benchmarks.gpu.compiled_experiments",
)


def compiled_environment(**changes: str) -> dict[str, str]:
    """This process's variables, but that kernels are compiled."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | changes


class Compiler:
    """Runs modules' main() one by one. Starts at the first."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, module: str, *arguments: str, **environment: str) -> list[dict[str, Any]]:
        """Lines of JSON that a module prints; one without dots is a module of this folder. It must end with 0."""
        module = module if "." in module else f"tests.kernels.triton.{module}"
        assert module in MODULES
        with tempfile.TemporaryDirectory() as place:
            out, error = Path(place) / "out", Path(place) / "error"
            status = self._ask([module, arguments, environment, str(out), str(error)])
            assert status == 0, error.read_text()[-2000:]
            return [json.loads(line) for line in out.read_text().splitlines()]

    def _ask(self, question: list[Any]) -> int:
        if self._process is None:
            command = (sys.executable, "-m", __name__)
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._process = subprocess.Popen(command, cwd=ROOT, env=compiled_environment(), process_group=0, **pipes)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            return int(process.stdout.readline())
        except BaseException:  # the test has run out of time, say: its answer is not the next one's
            self.close()
            raise

    def close(self) -> None:
        """End the interpreter and what it runs."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None


def main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        if os.fork() == 0:
            run(*json.loads(line))
        _, status = os.wait()
        print(os.waitstatus_to_exitcode(status), flush=True)


def run(module: str, arguments: list[str], environment: dict[str, str], out: str, error: str) -> None:
    """Run a module's main() in this process, and end. out, error: files for what it prints."""
    status = 1
    try:
        for number, path in ((1, out), (2, error)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        os.environ.update(environment)
        sys.argv = [module, *arguments]
        sys.modules[module].main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
