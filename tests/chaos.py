"""`make chaos`: a real server whose ranks and engine are killed, stopped, slowed down and short of memory.

    python -m tests.chaos [--minutes 10] [--seed 0] [--rounds N]

A round draws a layout of ranks, a fault and its victim, and the number of tokens after which it comes. Streams then end
with the tokens of an undisturbed server, or, where no other engine may start, the server ends with status 1 and its
last line names what has died. After each round nothing is left: no process, no file of its runtime directory or of
/dev/shm; sockets and memory that ranks share belong to processes. Each wait has a bound. Exit status 1 says what went
wrong, and with which seed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

PATIENCE = 180.0
"""Seconds. A wait that takes longer hangs."""
SHARED_MEMORY = Path("/dev/shm")
MARK = "CHAOS_ROUND"
"""Variable in the environment of all processes of a round."""
NUM_STREAMS, MAX_TOKENS = 3, 60
PROMPTS = [
    f"# {'Read the file and count its lines. ' * 8}\ndef read_{number}(path):\n    " for number in range(NUM_STREAMS)
]
"""Long enough to be dealt to ranks."""
EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
BALANCE = {"num_redundant_experts": 2, "window_size": 8, "step_interval": 16}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2}
LAYOUTS: dict[str, list[str]] = {
    "tp": ["-tp", "2"],
    "pp": ["-pp", "2"],
    "dcp": ["-tp", "2", "-dcp", "2", "--load-format", "dummy", "--hf-overrides", '{"num_key_value_heads": 1}'],
    "pcp": ["-pcp", "2"],
    "tp, pp": ["-tp", "2", "-pp", "2"],
    "pp, drafts": ["-pp", "2", "--speculative-config", json.dumps(DRAFTS)],
    "ep": [
        *("-tp", "2", "-ep", "--load-format", "dummy", "--hf-overrides", json.dumps(EXPERTS)),
        *("--enable-eplb", "--eplb-config", json.dumps(BALANCE)),
    ],
}
OPTIONS = ["--port", "0", "--threads", "1", "--num-blocks-override", "64", "--hung-engine-timeout", "6"]


class ChaosError(Exception):
    """Something hangs, leaks, or is not as it must be."""


@dataclass(frozen=True)
class Fault:
    """One fault. victim: "rank" or "core". restarts: another engine may start. is_end: the victim does not come
    back."""

    name: str
    victim: str
    restarts: bool
    is_end: bool

    def __str__(self) -> str:
        return f"{self.name} of a {self.victim}{', and no other engine' if self.is_end and not self.restarts else ''}"


FAULTS = [
    *(Fault("SIGKILL", victim, restarts, True) for victim in ("rank", "core") for restarts in (True, False)),
    *(Fault("SIGSTOP", victim, True, True) for victim in ("rank", "core")),
    *(Fault("SIGSTOP, SIGCONT", victim, True, False) for victim in ("rank", "core")),
    *(Fault("busy loops", victim, True, False) for victim in ("rank", "core")),
    Fault("full /dev/shm", "rank", True, False),
]


class Server:
    """A server in a process of its own, and all that it starts, which bears the mark of its round."""

    def __init__(self, layout: str, directory: Path, mark: str, *, restarts: bool, is_full: bool = False) -> None:
        self.mark = mark
        self.runtime = directory / "run"
        self.runtime.mkdir()
        self.log = directory / "stderr"
        command = [sys.executable, "-m", "quire", "serve", *OPTIONS, *LAYOUTS[layout]]
        command += ["--restart-engine"] if restarts else ["--no-restart-engine"]
        if is_full:
            command = full_shared_memory(command)
        environment = {**os.environ, MARK: mark, "QUIRE_RUNTIME_DIR": str(self.runtime)}
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            found = re.search(r"http://\S+", self._first_line())
        except BaseException:
            self.end()
            raise
        assert found is not None, "a server announces its address"
        self.url = found.group()

    def _first_line(self) -> str:
        assert self.popen.stdout is not None
        guard = threading.Timer(PATIENCE, self.popen.kill)
        guard.daemon = True
        guard.start()
        try:
            while line := self.popen.stdout.readline():
                if "http://" in line:
                    return line
        finally:
            guard.cancel()
        raise ChaosError(f"the server did not start: {self.log.read_text()[-600:]}")

    def victim(self, kind: str, rng: random.Random) -> psutil.Process:
        """One of its ranks, or the process of its engine core."""
        names = {"rank": "quire: rank", "core": "quire: engine"}
        found = [process for process in marked(self.mark) if names[kind] in " ".join(process.cmdline()[-1:])]
        if not found:
            raise ChaosError(f"no process is a {kind}")
        return rng.choice(sorted(found, key=lambda process: process.pid))

    def stop(self) -> int:
        """End it as its user does; its exit status."""
        self.popen.terminate()
        return self.wait()

    def wait(self) -> int:
        try:
            return self.popen.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise ChaosError("the server does not end") from None

    def end(self) -> None:
        """End all that is left of it."""
        for process in [self.popen, *marked(self.mark)]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
        self.popen.wait()


def full_shared_memory(command: list[str]) -> list[str]:
    """The command in a namespace whose /dev/shm is full; as it is, where this user may not make one."""
    mounted = ["unshare", "--mount", "sh", "-c"]
    script = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && head -c 64k /dev/zero >/dev/shm/full; exec "$@"'
    possible = subprocess.run([*mounted, "mount -t tmpfs tmpfs /dev/shm"], capture_output=True).returncode == 0
    return [*mounted, script, "sh", *command] if possible else command


def marked(mark: str) -> list[psutil.Process]:
    """The processes of a round that live."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def check_nothing_left(server: Server, shared_before: set[Path]) -> None:
    """Raise ChaosError for what a server that has ended leaves behind. shared_before: files of SHARED_MEMORY."""
    deadline = time.monotonic() + PATIENCE / 10
    while True:
        left = [f"process {process.pid}: {process.cmdline()[-1:]}" for process in marked(server.mark)]
        left += map(str, server.runtime.iterdir())
        left += [str(path) for path in set(SHARED_MEMORY.iterdir()) - shared_before if "quire" in path.name]
        if not left:
            return
        if time.monotonic() > deadline:
            raise ChaosError(f"left behind: {left}")
        time.sleep(0.1)


@contextlib.contextmanager
def serving(layout: str, mark: str, *, restarts: bool, is_full: bool = False) -> Iterator[Server]:
    """A server, which has ended when the block has, and leaves nothing. Raises ChaosError."""
    shared_before = set(SHARED_MEMORY.iterdir())
    with tempfile.TemporaryDirectory(prefix="q") as directory:
        server = Server(layout, Path(directory), mark, restarts=restarts, is_full=is_full)
        try:
            yield server
            check_nothing_left(server, shared_before)
        finally:
            server.end()


class Streams:
    """Streams of one server, side by side."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.texts = [""] * NUM_STREAMS
        self.num_pieces = 0
        self._came = asyncio.Event()

    async def run(self) -> list[str]:
        """The text of each. Raises httpx.HTTPError, or ChaosError for one that ends early."""
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE) as client, asyncio.timeout(PATIENCE):
            await asyncio.gather(*(self._one(client, number) for number in range(NUM_STREAMS)))
        return self.texts

    async def until(self, num_pieces: int) -> None:
        """Wait for this number of pieces, in all streams together."""
        while self.num_pieces < num_pieces:
            self._came.clear()
            await self._came.wait()

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        body = {
            "prompt": PROMPTS[number],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    piece = json.loads(line.removeprefix("data: "))
                    if "error" in piece:
                        raise ChaosError(f"a stream failed: {piece['error']}")
                    self.texts[number] += piece["choices"][0]["text"]
                    self.num_pieces += 1
                    self._came.set()
        raise ChaosError("a stream ended early")


class Loops:
    """Busy processes on the cores of one process."""

    def __init__(self, victim: psutil.Process) -> None:
        cores = victim.cpu_affinity()
        program = f"import os; os.sched_setaffinity(0, {cores})\nwhile True: pass"
        self._started = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


async def disturb(fault: Fault, server: Server, rng: random.Random) -> psutil.Process:
    """Let the fault happen; returns its victim."""
    victim = server.victim(fault.victim, rng)
    if fault.name == "SIGKILL":
        victim.kill()
    elif fault.name.startswith("SIGSTOP"):
        victim.suspend()
        await until_named(server, victim)
        if not fault.is_end:
            await asyncio.sleep(rng.uniform(0.05, 2.0))
            victim.resume()
    elif fault.name == "busy loops":
        loops = Loops(victim)
        await asyncio.sleep(rng.uniform(0.5, 2.0))
        loops.end()
    return victim


async def until_named(server: Server, victim: psutil.Process) -> None:
    """Wait until /health says which process is stopped."""
    name = victim.cmdline()[-1]
    said = f"rank {name.split()[-1]} is stopped" if "rank" in name else "the engine process is stopped"
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client, asyncio.timeout(PATIENCE):
        while said not in (answer := await client.get("/health")).text or answer.status_code != 503:
            await asyncio.sleep(0.05)


async def play(fault: Fault, server: Server, rng: random.Random, expected: list[str]) -> None:
    """One round on a running server. Raises ChaosError."""
    streams = Streams(server.url)
    running = asyncio.ensure_future(streams.run())
    try:
        await asyncio.wait_for(streams.until(rng.randrange(1, NUM_STREAMS * MAX_TOKENS // 3)), PATIENCE)
        victim = await disturb(fault, server, rng)
        if fault.is_end and not fault.restarts:
            await obituary(fault, server, victim, running)
            return
        found = await running
    finally:
        running.cancel()
    if found != expected:
        raise ChaosError(f"other tokens: {found} in place of {expected}")
    status = await asyncio.to_thread(server.stop)
    if status:
        raise ChaosError(f"the server ended with status {status}: {server.log.read_text()[-600:]}")


async def obituary(fault: Fault, server: Server, victim: psutil.Process, running: asyncio.Future[list[str]]) -> None:
    """The end of a server whose engine has died: status 1, and what has died in the last line."""
    with contextlib.suppress(httpx.HTTPError, ChaosError):
        await running
    status = await asyncio.to_thread(server.wait)
    last = server.log.read_text().strip().splitlines()[-1]
    who = (
        f"(process {victim.pid}) was killed by signal 9"
        if fault.victim == "rank"
        else "engine process was killed by signal 9"
    )
    if status != 1 or who not in last:
        raise ChaosError(f"status {status} and the last line {last!r}, without {who!r}")


class Expected:
    """The tokens of each layout, of a server that nothing disturbs."""

    def __init__(self) -> None:
        self._known: dict[str, list[str]] = {}

    def of(self, layout: str) -> list[str]:
        if layout not in self._known:
            with serving(layout, f"{os.getpid()} {layout}", restarts=False) as server:
                self._known[layout] = asyncio.run(Streams(server.url).run())
                server.stop()
        return self._known[layout]


def play_round(seed: int, expected: Expected) -> str:
    """Play the round of a seed; returns what it was. Raises ChaosError."""
    rng = random.Random(seed)
    layout, fault = rng.choice(list(LAYOUTS)), rng.choice(FAULTS)
    told, mark = f"seed {seed}: {layout}: {fault}", f"{os.getpid()} round {seed}"
    try:
        tokens, is_full = expected.of(layout), fault.name == "full /dev/shm"
        with serving(layout, mark, restarts=fault.restarts, is_full=is_full) as server:
            asyncio.run(play(fault, server, rng, tokens))
    except (ChaosError, TimeoutError, httpx.HTTPError) as error:
        raise ChaosError(f"{told}: {type(error).__name__} {error}") from error
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--rounds", type=int, help="number of rounds, whatever time they take")
    arguments = parser.parse_args()
    until, seed, expected = time.monotonic() + 60 * arguments.minutes, arguments.seed, Expected()
    last = None if arguments.rounds is None else seed + arguments.rounds
    while (time.monotonic() < until) if last is None else seed < last:
        try:
            print(play_round(seed, expected), flush=True)
        except ChaosError as error:
            sys.exit(f"chaos: {error}")
        seed += 1


if __name__ == "__main__":
    main()
