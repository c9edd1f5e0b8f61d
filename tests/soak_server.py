"""`make soak-server`: mixed traffic against a real server over the bundled model, and what must not grow under it.

    python -m tests.soak_server [--minutes 60] [--clients 8] [--seed 0] [--api-server-count 1]

Streams, whole answers, many prompts, samples, beams, structured output, wrong requests, clients that hang up early and
late, aborts in the queue. Each minute (each quarter of a short run) the traffic ends, and the server must be empty: no
request, no KV block, no more file descriptors or children than after the first round; from the middle of the run to its
end it may get no more threads, and its memory may not rise by more than ALLOWED_GROWTH. Exit status 1 says what grew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass

import httpx
import psutil

ALLOWED_GROWTH = 0.03
"""Of the resident memory of server and engine, from the second half's first round to the last: caches fill before."""
ROUND_SECONDS = 60.0
LEAST_ROUNDS = 4
SLACK_FILES = 4
"""File descriptors that a server may have more than after the first round: connections that are about to close."""
PROMPTS = ("import os\n", "def read(path):\n    ", "class Node:\n    def __init__(self", "x" * 300)


@dataclass
class Figures:
    """What a server holds when no request is there. memory: bytes of server and engine."""

    memory: int
    num_files: int
    num_threads: int
    num_children: int


class Server:
    """A server in a process of its own."""

    def __init__(self, num_processes: int) -> None:
        command = [
            sys.executable,
            "-m",
            "quire",
            "serve",
            "--port",
            "0",
            "--num-blocks-override",
            "512",
            "--api-server-count",
            str(num_processes),
        ]
        self._popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line!r}")
        self.url = found.group()
        self._process = psutil.Process(self._popen.pid)

    def figures(self) -> Figures:
        processes = [self._process, *self._process.children(recursive=True)]
        return Figures(
            memory=sum(each.memory_info().rss for each in processes),
            num_files=sum(each.num_fds() for each in processes),
            num_threads=sum(each.num_threads() for each in processes),
            num_children=len(processes) - 1,
        )

    def stop(self) -> int:
        self._popen.terminate()
        return self._popen.wait(60)


def draw_body(rng: random.Random) -> dict[str, object]:
    """A request of any kind."""
    body: dict[str, object] = {
        "prompt": rng.choice(PROMPTS) + str(rng.randrange(50)),
        "max_tokens": rng.randrange(1, 120),
    }
    body["stream"] = rng.random() < 0.6
    kind = rng.randrange(9)
    if kind == 0:
        body |= {"n": rng.randrange(2, 6), "temperature": 0.9, "logprobs": 2}
    elif kind == 1:
        body |= {"prompt": [rng.choice(PROMPTS) for _ in range(rng.randrange(2, 30))], "max_tokens": 10}
    elif kind == 2:
        body |= {"use_beam_search": True, "n": 2, "temperature": 0.0, "max_tokens": 12}
    elif kind == 3:
        body |= {"structured_outputs": {"regex": "[a-z]{2,12}(, [a-z]{2,9}){1,4}"}, "max_tokens": 60}
    elif kind == 4:
        body |= {"stop": ["\n", "return"], "echo": True, "prompt_logprobs": 1}
    elif kind == 5:
        body |= rng.choice([{"temperature": -1}, {"max_tokens": 10**9}, {"prompt": []}, {"n": 10**6}])
    elif kind == 6:
        body |= {"structured_outputs": {"regex": f"([a-z]{{1,{rng.randrange(2, 40)}}}"}}  # an open bracket
    return body


async def one_request(client: httpx.AsyncClient, rng: random.Random, counts: Counter[str]) -> None:
    body = draw_body(rng)
    patience = rng.uniform(0.0, 0.6) if rng.random() < 0.25 else None
    """Seconds after which the client hangs up."""
    try:
        async with asyncio.timeout(patience):
            answer = await client.post("/v1/completions", json=body)
        counts[f"status {answer.status_code}"] += 1
        if answer.status_code >= 500:
            raise SystemExit(f"{answer.status_code}: {answer.text[:500]}; request: {body}")
        if body["stream"] and answer.status_code == 200 and not answer.text.endswith("data: [DONE]\n\n"):
            raise SystemExit(f"a stream ended early: {answer.text[-500:]}; request: {body}")
    except TimeoutError:
        counts["hung up"] += 1


async def traffic(server: Server, seconds: float, num_clients: int, rng: random.Random, counts: Counter[str]) -> None:
    """Clients that ask one request after the other, until the time is over and the last ones are answered."""
    until = time.monotonic() + seconds

    async def ask(seed: int) -> None:
        own = random.Random(seed)
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            while time.monotonic() < until:
                await one_request(client, own, counts)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(ask(rng.randrange(2**32)))


async def until_empty(server: Server) -> None:
    """Until the server has neither requests nor blocks in use. A minute is a bound for failure."""
    names = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        for _ in range(600):
            text = (await client.get("/metrics")).text
            load = (await client.get("/load")).json()["server_load"]
            values = {name: float(re.findall(rf"^\S*{name}(?:{{.*}})? (\S+)$", text, re.M)[0]) for name in names}
            if not load and not any(values.values()):
                return
            await asyncio.sleep(0.1)
    raise SystemExit(f"something is left: {values}, load {load}")


def judge(rounds: list[Figures]) -> list[str]:
    """What grew."""
    first, middle, last = rounds[0], rounds[len(rounds) // 2], rounds[-1]
    found = []
    if last.num_files > first.num_files + SLACK_FILES:
        found.append(f"file descriptors: {first.num_files} -> {last.num_files}")
    if last.num_threads > middle.num_threads:  # pools start their threads when they first need them
        found.append(f"threads: {middle.num_threads} -> {last.num_threads}")
    if last.num_children > first.num_children:
        found.append(f"children: {first.num_children} -> {last.num_children}")
    if last.memory > middle.memory * (1 + ALLOWED_GROWTH):
        found.append(f"memory: {middle.memory / 2**20:.1f} -> {last.memory / 2**20:.1f} MiB")
    return found


async def run(minutes: float, num_clients: int, seed: int, num_processes: int) -> list[str]:
    server = Server(num_processes)
    rng, counts, rounds = random.Random(seed), Counter[str](), list[Figures]()
    num_rounds = max(LEAST_ROUNDS, round(minutes * 60 / ROUND_SECONDS))
    try:
        for number in range(num_rounds):
            await traffic(server, minutes * 60 / num_rounds, num_clients, rng, counts)
            await until_empty(server)
            await asyncio.sleep(1.0)  # connections that their clients have closed
            rounds.append(server.figures())
            print(f"round {number + 1} of {num_rounds}: {rounds[-1]}; {dict(sorted(counts.items()))}", flush=True)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            status = server.stop()
    if status:
        return [f"the server ended with {status}"]
    return judge(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-server-count", type=int, default=1)
    arguments = parser.parse_args()
    grown = asyncio.run(run(arguments.minutes, arguments.clients, arguments.seed, arguments.api_server_count))
    for line in grown:
        print(f"grew: {line}", file=sys.stderr)
    sys.exit(1 if grown else 0)


if __name__ == "__main__":
    main()
