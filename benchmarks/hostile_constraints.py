"""Clients that send hostile constraints without pause, beside honest ones: waits, gaps, memory, and the end.

Starts `quire serve` with the bundled model. Connections (twelve, unless told otherwise) send texts that crash a
compiler, take it for ever, are large, make masks that take long (`ambiguous`, until their size ends them; `entangled`,
a third of a second each), or leave one text only (`constant`, `certain`). Beside them a client asks for a `choice` and
another one after it, one stream runs free and one under a regular expression. Printed: what they get alone and beside
the attack, memory of all processes before, at most, and 30 s later, and the seconds that SIGTERM takes.

    python benchmarks/hostile_constraints.py [--seconds 60] [--kinds crash,slow,...] [--attackers 12] [--json FILE]
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

NUM_ATTACKERS = 12
REST_SECONDS = 30.0
ENTANGLED = "start: a\na: a a | b a | /[a-z]/\nb: a | a b"
AMBIGUOUS = 'start: a\na: a a | "x" | "y" | /[a-z ]/ | ""'


def crash(number: int) -> dict[str, Any]:
    return {"grammar": f'start: %json {{"enum": [{number}, -9223372036854775808]}}'}


def slow(number: int) -> dict[str, Any]:
    return {"json": {"type": "integer", "multipleOf": 2**31 - 1 - 2 * number}}


def expression(number: int) -> dict[str, Any]:
    return {"regex": "^" * 60_000 + f"a{number}"}


def large(number: int) -> dict[str, Any]:
    properties = {f"p{number}_{each}": {"type": "string", "maxLength": each % 50 + 1} for each in range(2000)}
    return {"json": {"type": "object", "properties": properties, "additionalProperties": False}}


def ambiguous(number: int) -> dict[str, Any]:
    return {"grammar": f"{AMBIGUOUS}\n// {number}"}


def entangled(number: int) -> dict[str, Any]:
    return {"grammar": f"{ENTANGLED}\n// {number}"}


def certain(number: int) -> dict[str, Any]:
    """One text of 100,000 characters."""
    properties = {name: {"const": f"{number}" + "ab" * 25_000} for name in ("first", "second")}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"json": schema, "disable_any_whitespace": True}


def constant(number: int) -> dict[str, Any]:
    return {"json": {"const": f"{number}" + "ab" * 30_000}}


def parts(number: int) -> dict[str, Any]:
    return {"regex": f"(a{number % 10}?b?c?d?e?f?){{0,400}}"}


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    each.__name__: each for each in (crash, slow, expression, large, ambiguous, entangled, constant, certain, parts)
}


class Client:
    """One connection to the server."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)

    def post(self, **fields: Any) -> http.client.HTTPResponse:
        body = json.dumps({"prompt": "x = ", "temperature": 1.0, **fields})
        self._connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return self._connection.getresponse()

    def complete(self, **fields: Any) -> int:
        """The status of one request, whose answer is read to its end."""
        answer = self.post(**fields)
        answer.read()
        return answer.status


class Stream(threading.Thread):
    """A stream that is asked for again and again: its worst gap between two chunks, and its tokens a second."""

    def __init__(self, port: int, **fields: Any) -> None:
        super().__init__(daemon=True)
        self._client, self._fields = Client(port), fields
        self.gaps: list[float] = []
        self.num_chunks = 0
        self.is_over = threading.Event()

    def run(self) -> None:
        self.started = time.perf_counter()
        for seed in itertools.count():
            answer = self._client.post(stream=True, max_tokens=400, seed=seed, ignore_eos=True, **self._fields)
            last = None
            for line in answer:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        self.gaps.append(now - last)
                    last = now
                    self.num_chunks += 1
            if self.is_over.is_set():
                self.seconds = time.perf_counter() - self.started
                return

    def finish(self) -> dict[str, float]:
        self.is_over.set()
        self.join()
        return {"chunks/s": self.num_chunks / self.seconds, "worst gap s": max(self.gaps)}


def attack(port: int, kinds: list[str], numbers: Iterator[int], is_over: threading.Event, statuses: list[int]) -> None:
    client = Client(port)
    while not is_over.is_set():
        number = next(numbers)
        statuses.append(client.complete(max_tokens=200, structured_outputs=KINDS[kinds[number % len(kinds)]](number)))


def observe(port: int, seconds: float) -> dict[str, Any]:
    """Figures of the honest clients, for so long."""
    streams = {"free": Stream(port), "bound": Stream(port, structured_outputs={"regex": "[a-z ]{1,4000}"})}
    for each in streams.values():
        each.start()
    client, waits, end = Client(port), [], time.perf_counter() + seconds
    for number in itertools.count():
        began = time.perf_counter()
        status = client.complete(max_tokens=8, structured_outputs={"choice": ["yes", f"no{number}"]})
        waits.append(time.perf_counter() - began)
        if status != 200:
            raise SystemExit(f"a choice was answered with {status}")
        if time.perf_counter() > end:
            break
        time.sleep(0.05)
    waits.sort()
    figures: dict[str, Any] = {
        "choices": len(waits),
        "choice p50 s": statistics.median(waits),
        "choice p99 s": waits[int(0.99 * (len(waits) - 1))],
        "choice max s": waits[-1],
    }
    for name, stream in streams.items():
        figures |= {f"{name}: {what}": value for what, value in stream.finish().items()}
    return figures


def memory(process: psutil.Process) -> float:
    """MiB of all processes of the server, shared pages counted once."""
    found = 0
    for each in (process, *process.children(recursive=True)):
        try:
            found += each.memory_full_info().pss
        except psutil.Error:
            continue
    return found / 2**20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(port: int) -> None:
    for _ in range(600):
        try:
            if Client(port).complete(max_tokens=2, structured_outputs={"choice": ["a", "b"]}) == 200:
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server does not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--attackers", type=int, default=NUM_ATTACKERS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "quire", "serve", "--port", str(port)], stderr=subprocess.DEVNULL)
    process = psutil.Process(server.pid)
    try:
        wait_ready(port)
        alone = observe(port, arguments.seconds / 3)
        before = memory(process)
        is_over, statuses, numbers = threading.Event(), list[int](), itertools.count()
        attackers = [
            threading.Thread(
                target=attack, args=(port, arguments.kinds.split(","), numbers, is_over, statuses), daemon=True
            )
            for _ in range(arguments.attackers)
        ]
        for each in attackers:
            each.start()
        beside = observe(port, arguments.seconds)
        during = memory(process)
        is_over.set()
        for each in attackers:
            each.join()
        time.sleep(REST_SECONDS)
        later = memory(process)
    finally:
        began = time.perf_counter()
        server.send_signal(signal.SIGTERM)
        status = server.wait(120)
    figures = {
        "alone": alone,
        "beside the attack": beside,
        "attacks": {f"status {each}": statuses.count(each) for each in sorted(set(statuses))},
        "memory MiB": {"before": before, "during": during, "30 s later": later},
        "SIGTERM": {"seconds": time.perf_counter() - began, "status": status},
    }
    for name, values in figures.items():
        print(f"{name}: " + ", ".join(f"{what} {value:.3g}" for what, value in values.items()))
    for name in ("free", "bound"):
        print(f"{name} stream beside the attack: {beside[f'{name}: chunks/s'] / alone[f'{name}: chunks/s']:.2f} x")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
