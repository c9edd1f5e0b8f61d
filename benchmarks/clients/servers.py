"""The servers that clients talk to, each a process that lives as long as it is used."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

API_KEY = "secret"
STOP_SECONDS = 60
ROOT = Path(__file__).parents[2]
_SERVE = ("-m", "quire", "serve", "--port", "0", "--api-key", API_KEY)
_COMMANDS = {
    "scripted": ("-m", "benchmarks.clients.scripted"),
    "bundled": (*_SERVE, "--served-model-name", "bundled"),
    "sights": (*_SERVE, "bundled-sights", "--served-model-name", "sights"),
    "pooling": (*_SERVE, "--served-model-name", "pooling", "--runner", "pooling"),
}
"""Name, which is also the model's -> what the interpreter is given. scripted: a fake model that says what the
conversation tells it to; bundled: the small model of the package; sights: its model that sees; pooling: the small model
as an embedder."""


@dataclass(frozen=True)
class Server:
    name: str
    url: str

    @property
    def environment(self) -> dict[str, str]:
        """Of the processes of clients."""
        return {"QUIRE_URL": self.url, "QUIRE_API_KEY": API_KEY, "QUIRE_MODEL": self.name}


@contextlib.contextmanager
def running(name: str, logs: Path) -> Iterator[Server]:
    """Start a server. Raises RuntimeError when it does not come up: its log says why."""
    log = logs / f"server-{name}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *_COMMANDS[name]], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if " serves " not in line:
            raise RuntimeError(f"the server {name} does not start: see {log}")
        yield Server(name, line.split(" on ")[1].split()[0])
    finally:
        process.terminate()
        try:
            process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
