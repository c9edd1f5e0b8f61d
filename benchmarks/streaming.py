"""What one token and one request cost on their way out of the server: python -m benchmarks.streaming

streams: streaming clients of the bundled model, in turns with `LLM.generate` of the same work: seconds of the processor
a token in each process, tokens/s, and the engine's time between steps. requests: short requests to an engine that
computes nothing. body: the longest gap in a stream while a chat history of 8 MB arrives. holds: how long such a body
keeps the event loop, in seconds of the processor. Clients are raw sockets in a
process of their own. Prints medians beside the targets; on a busy machine only seconds of the processor mean much.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.config.options import OUTPUT_WINDOW, EngineOptions
from quire.engine.async_engine import AsyncLLM
from quire.engine.input_processor import Prompt
from quire.engine.step_log import read_step_log
from quire.server.app import create_app
from quire.server.http_protocol import make_http_server
from quire.server.listener import bind
from quire.server.run import serve
from quire.server.settings import ServerSettings
from tests.fakes.executor import FakeExecutor

PROMPT_TOKENS = 16
VOCAB_SIZE = 4096
"""Of the bundled model."""
STEP_SECONDS = 0.005
"""Of the engine that computes nothing, where a stream is watched."""
BODY_BYTES = 8_000_000
WARM_STREAM_SECONDS = 1.0
STREAM_TOKENS = 5000
"""Half a minute, in which the large body is answered."""
LONE_STREAM_TOKENS = 1000
MOST_BODY_ROUNDS = 3
LONG_CONTEXT = 8_000_000
LONG_CONTEXT_OPTIONS: dict[str, Any] = {
    "hf_overrides": {"max_position_embeddings": LONG_CONTEXT},
    "num_blocks_override": LONG_CONTEXT // 16 + 64,
    "max_num_batched_tokens": 2**14,
}
TICK_SECONDS = 0.0005
TEXT = "def add(first, second):\n    return first + second\n"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENGINE_NAME = "quire: engine"
"""In the command line of the engine's process."""


def instant(config: EngineConfig) -> FakeExecutor:
    """An executor that computes nothing, and takes no time for it."""
    return FakeExecutor(vocab_size=VOCAB_SIZE, verify=False)


def steady(config: EngineConfig) -> FakeExecutor:
    """An executor that computes nothing, one step after the other in even time."""
    return FakeExecutor(vocab_size=VOCAB_SIZE, verify=False, latency=STEP_SECONDS)


# The server


def _serve(options: dict[str, Any], port: int, executor: str | None) -> None:
    settings = ServerSettings(port=port)
    more = {} if executor is None else {"executor": f"benchmarks.streaming:{executor}"}
    sys.exit(serve(EngineOptions.from_keywords(options), settings, **more))


class Cost(NamedTuple):
    """Seconds of the processor."""

    engine: float
    api: float


class Server:
    """`serve` in a process of its own, with the engine's process below it."""

    def __init__(self, port: int, process: psutil.Process) -> None:
        self.port = port
        children = process.children(recursive=True)
        self._engines = [child for child in children if ENGINE_NAME in child.cmdline()]
        self._others = [process, *(child for child in children if child not in self._engines)]

    def cost(self) -> Cost:
        """So far."""
        return Cost(sum(map(_seconds, self._engines)), sum(map(_seconds, self._others)))


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def serving(options: dict[str, Any], executor: str | None = None) -> Iterator[Server]:
    """executor: a function of this module; None: the one that computes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(options, port, executor))
    process.start()
    assert process.pid is not None
    try:
        while not _listens(port):
            if not process.is_alive():
                raise RuntimeError(f"the server ended with status {process.exitcode}")
            time.sleep(0.1)
        yield Server(port, psutil.Process(process.pid))
    finally:
        process.terminate()
        process.join()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


# The client, in a process of its own


class Done(NamedTuple):
    """seconds: from the first request to the last answer. cpu: of the client. gaps: between two reads of a stream, the
    longest one of each."""

    seconds: float
    cpu: float
    gaps: list[float]


def _client(port: int, first: list[bytes], num_repeats: int, pipe: Any) -> None:
    pipe.send(None)
    pipe.recv()
    pipe.send(converse(port, first, num_repeats))


@dataclass(slots=True)
class _Connection:
    number: int
    socket: socket.socket
    left: int
    end: bytes = b""
    last: float = 0.0
    gap: float = 0.0


def converse(port: int, requests: Sequence[bytes], num_repeats: int) -> Done:
    """A connection for each of `requests`, which is sent `num_repeats` times, each time when the answer before it is
    complete. Answers are chunked: a stream, or end with the JSON object's brace."""
    selector, connections = selectors.DefaultSelector(), []
    for number in range(len(requests)):
        connected = socket.create_connection(("127.0.0.1", port))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(number, connected, num_repeats)
        connections.append(connection)
        selector.register(connected, selectors.EVENT_READ, connection)
    began, used = time.perf_counter(), time.process_time()
    for connection in connections:
        connection.socket.sendall(requests[connection.number])
    num_open = len(connections)
    while num_open:
        for key, _ in selector.select():
            connection = key.data
            data = connection.socket.recv(1 << 16)
            now = time.perf_counter()
            if not data or not (connection.end or data.startswith(b"HTTP/1.1 200")):
                raise RuntimeError(f"the server answered {data[:400]!r}")
            if connection.last:
                connection.gap = max(connection.gap, now - connection.last)
            connection.last = now
            connection.end = (connection.end + data)[-16:]
            if not connection.end.endswith((b"\r\n0\r\n\r\n", b"}")):
                continue
            connection.left -= 1
            connection.end = b""
            if connection.left:
                connection.socket.sendall(requests[connection.number])
            else:
                num_open -= 1
                selector.unregister(connection.socket)
    done = Done(time.perf_counter() - began, time.process_time() - used, [each.gap for each in connections])
    for connection in connections:
        connection.socket.close()
    return done


class Running:
    """A client process, which has started and has its requests: that takes time of the processor which is no request's.
    It works from `begin` on."""

    def __init__(self, port: int, requests: list[bytes], num_repeats: int = 1) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_client, args=(port, requests, num_repeats, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def begin(self) -> Running:
        self._pipe.send(None)
        return self

    @property
    def is_at_work(self) -> bool:
        return not self._pipe.poll()

    def done(self) -> Done:
        done: Done = self._pipe.recv()
        self._process.join()
        return done


def post(path: str, **body: Any) -> bytes:
    content = json.dumps({"model": "bundled", **body}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    return head.encode() + b"\r\n\r\n" + content


# What is measured


class Round(NamedTuple):
    """One round of `streams`. Seconds of the processor a token."""

    offline: float
    engine: float
    api: float
    client: float
    wall: float
    """Tokens/s of the server over those of LLM.generate."""
    rate: float
    """Tokens/s of the server."""


def streams(arguments: argparse.Namespace) -> None:
    for num_clients in arguments.clients:
        compare(arguments, num_clients)


def compare(arguments: argparse.Namespace, num_clients: int) -> None:
    """Print what streams cost beside LLM.generate."""
    num_tokens, path = arguments.tokens, arguments.path
    sizes = {"kv_cache_memory": "64MiB", "num_threads": arguments.threads, "enable_prefix_caching": False}
    prompts: list[Prompt] = [[(7 * n + i) % VOCAB_SIZE for i in range(PROMPT_TOKENS)] for n in range(num_clients)]
    asked = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    if path == CHAT:
        requests = [post(path, messages=[{"role": "user", "content": f"{n}"}], **asked) for n in range(num_clients)]
    else:
        requests = [post(path, prompt=prompt, **asked) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    total, rounds = num_clients * num_tokens, []
    with (
        tempfile.TemporaryDirectory() as directory,
        LLM(**sizes) as llm,
        serving({**sizes, "output_window": arguments.output_window, "step_log": Path(directory) / "steps"}) as server,
    ):
        for number in range(arguments.rounds + 1):  # the first one warms up
            began, used = time.perf_counter(), time.process_time()
            llm.generate(prompts, params, use_tqdm=False)
            offline, used = time.perf_counter() - began, time.process_time() - used
            before = server.cost()
            done = Running(server.port, requests).begin().done()
            after = server.cost()
            if number:
                engine, api = (after.engine - before.engine) / total, (after.api - before.api) / total
                wall, rate = offline / done.seconds, total / done.seconds
                rounds.append(Round(used / total, engine, api, done.cpu / total, wall, rate))
        time.sleep(2)  # until the log is written
        steps = [step for step in read_step_log(Path(directory) / "steps")[1] if step.num_carried]
    gap = statistics.median(step.gap for step in steps)  # other programs stretch single ones
    median = Round(*(statistics.median(column) for column in zip(*rounds, strict=True)))
    share = gap / (gap + statistics.median(step.seconds for step in steps))
    ratio = statistics.median((row.engine + row.api) / row.offline for row in rounds)
    print(f"{num_clients} streams of {num_tokens} tokens, {path}, {arguments.threads} threads, {len(rounds)} rounds")
    for name in ("offline", "engine", "api", "client"):
        label = "LLM.generate" if name == "offline" else f"server: {name}"
        print(f"  {label:<16} {1e6 * getattr(median, name):8.1f} us of the processor a token")
    print(f"  engine and API over LLM.generate: {ratio:.2f} (target: at most 1.25, 64 streams)")
    over = f"{median.wall:.2f} of LLM.generate's (target: 0.80; one stream 0.90)"
    print(f"  tokens/s of the server: {median.rate:,.0f}, {over}")
    print(f"  engine between steps: {share:.1%} of a median step's time (target: at most 5 %)")


def requests(arguments: argparse.Namespace) -> None:
    """Print what short requests cost."""
    num_clients, num_repeats = 32, arguments.requests // 32
    with serving({"num_blocks_override": 512}, "instant") as server:
        asked = [post(COMPLETIONS, prompt=[n + 1, 2, 3], max_tokens=1) for n in range(num_clients)]
        rows = []
        for _ in range(arguments.rounds + 1):
            before = server.cost()
            done = Running(server.port, asked, num_repeats).begin().done()
            cost = [(after - earlier) for after, earlier in zip(server.cost(), before, strict=True)]
            rows.append([1e6 * each / (num_clients * num_repeats) for each in (*cost, done.cpu, done.seconds)])
    engine, api, client, wall = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    print(
        f"{num_clients * num_repeats} requests of one token over {num_clients} connections, an engine without a model"
    )
    print(f"  us of the processor a request: API {api:.0f}, engine {engine:.0f}, client {client:.0f}")
    print(f"  {1e6 / api:.0f} requests/s of API process (target: 2000); here {1e6 / wall:.0f} with all on one machine")


def body(arguments: argparse.Namespace) -> None:
    """Print how long a large body holds up another stream."""
    one = {"role": "user", "content": TEXT * 80}
    messages = [one] * (BODY_BYTES // len(json.dumps(one)))
    with serving(LONG_CONTEXT_OPTIONS, "steady") as server:
        for name, num_messages in (("nothing else", 0), (f"a chat history of {BODY_BYTES} bytes", len(messages))):
            gaps = []
            num_tokens = STREAM_TOKENS if num_messages else LONE_STREAM_TOKENS
            for _ in range(min(arguments.rounds, MOST_BODY_ROUNDS)):
                stream = post(COMPLETIONS, prompt=[1, 2, 3], max_tokens=num_tokens, ignore_eos=True, stream=True)
                running = Running(server.port, [stream])
                large = post(CHAT, messages=messages[:num_messages], max_tokens=1)
                history = Running(server.port, [large]) if num_messages else None
                running.begin()
                time.sleep(WARM_STREAM_SECONDS)
                if history is not None:
                    history.begin().done()
                    if not running.is_at_work:
                        raise RuntimeError("the stream ended before the body was answered")
                gaps.append(1e3 * running.done().gaps[0])
            print(f"  beside {name}: longest gap {statistics.median(gaps):.1f} ms ({min(gaps):.1f} to {max(gaps):.1f})")
    print("  (target: 20 ms more; a step takes 5 ms)")


async def _holds(requests: list[bytes]) -> list[float]:
    """By request, the most seconds of the processor between two ticks of the server's event loop."""
    options = EngineOptions.from_keywords(LONG_CONTEXT_OPTIONS)
    engine = AsyncLLM.from_options(options, executor="benchmarks.streaming:instant")
    settings = ServerSettings(port=0)
    server = make_http_server(create_app(engine, settings), settings, shutdown_grace_seconds=2)
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        used = time.process_time()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            before, used = used, time.process_time()
            longest = max(longest, used - before)

    found = []
    with bind(settings) as listener:
        port = listener.getsockname()[1]
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(TICK_SECONDS)
        gc.collect()
        gc.freeze()  # as `serve` does
        watching = asyncio.ensure_future(watch())
        for request in requests:
            client = await asyncio.to_thread(Running, port, [request])
            await asyncio.sleep(2 * TICK_SECONDS)  # what starting it took is no tick's any more
            longest = 0.0
            await asyncio.to_thread(client.begin().done)
            found.append(longest)
        watching.cancel()
        server.should_exit = True
        await serving
    engine.shutdown()
    return found


def holds(arguments: argparse.Namespace) -> None:
    """Print how long a large body keeps the event loop from everything else, whatever else the machine does."""
    texts, parts = (
        "def add(first, second):\n    return first + second\n" * 40,
        [{"type": "text", "text": "x" * 10}] * 240,
    )
    for name, content in (("texts of 2 KB", texts), ("parts of 10 characters", parts)):
        one = {"role": "user", "content": content}
        large = post(CHAT, messages=[one] * (BODY_BYTES // len(json.dumps(one))), max_tokens=1)
        small = post(CHAT, messages=[one], max_tokens=1)
        longest = max(asyncio.run(_holds([small, *[large] * arguments.rounds]))[1:])
        print(f"a chat history of {BODY_BYTES} bytes in {name}: the event loop waits {1e3 * longest:.0f} ms at most")
    print("  (target: 20 ms; without what the engine's process does)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[argparse.Namespace], None]] = {
        "streams": streams,
        "requests": requests,
        "body": body,
        "holds": holds,
    }
    parser.add_argument("--what", nargs="+", choices=[*parts], default=[*parts])
    parser.add_argument("--clients", type=int, nargs="*", default=[64, 1])
    parser.add_argument("--tokens", type=int, default=256, help="of a stream")
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False))
    parser.add_argument("--output-window", type=float, default=OUTPUT_WINDOW, help="seconds; of the server's engine")
    parser.add_argument("--path", default=COMPLETIONS, choices=[COMPLETIONS, CHAT])
    arguments = parser.parse_args()
    for what in arguments.what:
        parts[what](arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
