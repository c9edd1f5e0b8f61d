"""Several API processes in front of one engine: which of them answers makes no difference."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quire.config.options import EngineOptions
from quire.errors import ConfigError
from quire.server.run import serve
from quire.server.settings import ServerSettings
from tests.processes import has_ended
from tests.server.serve_process import Process

GUARD_SECONDS = 120
KEYS = """
[plain]
key = "plain"
[few]
key = "few"
tokens_per_minute = 1
"""
STREAM = {"prompt": "abc", "max_tokens": 200, "stream": True}
"""The very slow engine takes 80 seconds for it: it is always met at work."""
COPIED, LONG = "wxyz" * 2, "a" * 120


def client_of(url: str, **options: Any) -> httpx.Client:
    """A client that keeps its one connection, and thereby its API process."""
    limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
    headers = {"Authorization": "Bearer plain"}
    return httpx.Client(base_url=url, limits=limits, timeout=GUARD_SECONDS, headers=headers, **options)


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Two API processes before an engine that takes 0.4 seconds a step and runs four sequences."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(KEYS)
    process = Process(
        model_path,
        "very_slow",
        api_server_count=2,
        served_model_name=["tiny"],
        enable_admin_routes=True,
        enable_sleep_mode=True,
        api_key_file=str(keys),
        max_num_queued=2,
        keep_alive_timeout=10 * GUARD_SECONDS,
    )
    yield process.wait_ready()
    process.popen.kill()
    process.popen.communicate()


@pytest.fixture
def pair(server: Process) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """A client of each process, when nothing runs."""
    with client_of(server.url) as first, client_of(server.url) as second:
        until(lambda: first.get("/load").json()["server_load"] == 0)
        while process_of(server, first) == process_of(server, second):
            second.close()
            second = client_of(server.url)
        yield first, second
        second.close()


def process_of(server: Process, client: httpx.Client) -> psutil.Process:
    """The API process at the other end of a client's connection."""
    stream = client.get("/version").extensions["network_stream"]
    port = stream.get_extra_info("client_addr")[1]
    [found] = [
        process
        for process in server.api_processes
        if any(connection.raddr and connection.raddr.port == port for connection in process.net_connections())
    ]
    return found


def until(is_so: Callable[[], bool]) -> None:
    """Wait for what stays so once it is."""
    deadline = time.monotonic() + GUARD_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def value(client: httpx.Client, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    found = 0.0
    for line in client.get("/metrics").text.splitlines():
        sample, _, number = line.rpartition(" ")
        if re.split(r"[{ ]", sample)[0] == name and all(f'{key}="{text}"' in sample for key, text in labels.items()):
            found += float(number)
    return found


def complete(client: httpx.Client, text: str = "ab", **fields: Any) -> httpx.Response:
    """A request that is answered with `text`."""
    return client.post("/v1/completions", json={"prompt": f"={text}", **fields})


@contextlib.contextmanager
def streams(server: Process, count: int) -> Iterator[None]:
    """Streams that have begun, from a client each; all clients hang up at the end of the block."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(client_of(server.url))
            stack.enter_context(client.stream("POST", "/v1/completions", json=STREAM))
        yield


def test_connections_go_to_the_process_with_the_fewest(server: Process) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(client_of(server.url)) for _ in range(8)]
        pids = [process_of(server, client).pid for client in clients]
        first, second = (process.pid for process in server.api_processes)
        assert abs(pids.count(first) - pids.count(second)) <= 2


def test_metrics_are_sums(server: Process, pair: tuple[httpx.Client, httpx.Client]) -> None:
    names: dict[str, dict[str, str]] = {
        "vllm:request_success_total": {"finished_reason": "stop"},
        "vllm:time_to_first_token_seconds_count": {},
        "vllm:request_prompt_tokens_sum": {},
        "vllm:iteration_tokens_total_sum": {},
        "quire_http_requests_total": {"handler": "/v1/completions", "method": "POST", "status": "200"},
    }
    before = {name: value(pair[0], name, **labels) for name, labels in names.items()}
    for number, client in enumerate((*pair, pair[0])):
        assert complete(client, "ab" + "c" * number).json()["choices"][0]["text"] == "ab" + "c" * number
    http = "quire_http_requests_total"  # counted once an answer is over, which its client may see a moment before
    until(lambda: value(pair[1], http, **names[http]) == before[http] + 3)
    expected = dict(zip(names, (3, 3, 4 + 5 + 6, 0, 3), strict=True))
    for client in pair:
        told = {name: value(client, name, **labels) - before[name] for name, labels in names.items()}
        expected["vllm:iteration_tokens_total_sum"] = told["vllm:iteration_tokens_total_sum"]
        assert told == expected
        assert told["vllm:iteration_tokens_total_sum"] >= 15
    resident = sum(process.memory_info().rss for process in server.api_processes)
    assert value(pair[0], "process_resident_memory_bytes") > 0.9 * resident


def test_a_request_id_is_in_use_in_all_processes(server: Process, pair: tuple[httpx.Client, httpx.Client]) -> None:
    long = {**STREAM, "request_id": "mine"}
    with client_of(server.url) as other, other.stream("POST", "/v1/completions", json=long):
        refused = [complete(client, request_id="mine") for client in pair]
        assert [answer.status_code for answer in refused] == [400, 400]
        assert all("already in use" in answer.json()["error"]["message"] for answer in refused)
    until(lambda: value(pair[0], "vllm:num_requests_running") == 0)
    assert [complete(client, request_id="mine").status_code for client in pair] == [200, 200]


def test_the_queue_has_one_bound(server: Process, pair: tuple[httpx.Client, httpx.Client]) -> None:
    """Four run and two wait, whichever process they came through; the engine is told of the end of each."""
    with streams(server, 4):
        until(lambda: value(pair[0], "vllm:num_requests_running") == 4)
        with contextlib.ExitStack() as stack:
            waiting = [stack.enter_context(client_of(server.url)) for _ in range(2)]
            for client in waiting:
                stack.enter_context(_sending(client))
            until(lambda: all(client.get("/load").json()["server_load"] == 6 for client in pair))
            for client in pair:
                refused = complete(client)
                assert refused.status_code == 429
                assert "2 requests wait (limit 2)" in refused.json()["error"]["message"]
            frame = pair[1].get("/debug/kv").json()
            assert len({request["request_id"] for request in frame["kv"]["requests"]}) == 6
            assert value(pair[0], "vllm:admission_rejections_total") == value(
                pair[1], "vllm:admission_rejections_total"
            )
    until(lambda: all(client.get("/load").json()["server_load"] == 0 for client in pair))
    until(lambda: value(pair[0], "vllm:num_requests_running") == value(pair[0], "vllm:num_requests_waiting") == 0)


def test_the_limit_of_a_key_is_one(server: Process, pair: tuple[httpx.Client, httpx.Client]) -> None:
    """A first answer uses up the tokens of some minutes."""
    headers = {"Authorization": "Bearer few"}
    answers = [client.post("/v1/completions", json={"prompt": "=abc"}, headers=headers) for client in (*pair, pair[0])]
    assert [answer.status_code for answer in answers] == [200, 429, 429]


def test_a_pause_and_sleep_are_everywhere(pair: tuple[httpx.Client, httpx.Client]) -> None:
    first, second = pair
    for begin, end in (("/pause", "/resume"), ("/sleep", "/wake_up")):
        for one, other in (pair, pair[::-1]):
            assert one.post(begin).status_code == 200
            assert [client.get("/ready").status_code for client in pair] == [503, 503]
            assert other.get("/is_paused").json()["is_paused"] is (begin == "/pause")
            assert [complete(client).status_code for client in pair] == [503, 503]
            assert other.get("/is_sleeping").json()["is_sleeping"] is (begin == "/sleep")
            assert other.post(end).status_code == 200
            assert [client.get("/ready").status_code for client in pair] == [200, 200]
    assert complete(first).json()["choices"][0]["text"] == complete(second).json()["choices"][0]["text"] == "ab"
    assert second.post("/reset_prefix_cache").status_code == 200


def test_responses_are_gone_on_from_anywhere(pair: tuple[httpx.Client, httpx.Client]) -> None:
    first, second = pair
    begun = first.post("/v1/responses", json={"input": "=ab", "max_output_tokens": 16}).json()
    assert second.get(f"/v1/responses/{begun['id']}").json() == begun
    body = {"input": "=cd", "previous_response_id": begun["id"], "max_output_tokens": 16}
    gone_on = second.post("/v1/responses", json=body).json()
    assert gone_on["usage"]["input_tokens"] > begun["usage"]["input_tokens"]
    assert second.delete(f"/v1/responses/{begun['id']}").json()["deleted"] is True
    assert first.get(f"/v1/responses/{begun['id']}").status_code == 404


def begin_in_the_background(client: httpx.Client, text: str) -> str:
    """Its id. The client hangs up."""
    with client.stream("POST", "/v1/responses", json={"input": text, "background": True, "stream": True}) as stream:
        return next(events_of(stream))["response"]["id"]


def events_of(stream: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in stream.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def follow(client: httpx.Client, path: str, first: int) -> list[dict[str, Any]]:
    with client.stream("GET", path, params={"stream": "true", "starting_after": str(first - 1)}) as stream:
        assert stream.status_code == 200
        return list(events_of(stream))


def test_a_response_in_the_background_is_the_same_in_all_processes(
    server: Process, pair: tuple[httpx.Client, httpx.Client]
) -> None:
    """Be it followed, continued, cancelled or deleted where it is not made."""
    paths = []
    for text in ("=ab", LONG, LONG):
        with client_of(server.url) as client:
            maker = process_of(server, client)
            paths.append("/v1/responses/" + begin_in_the_background(client, text))
        own, other = sorted(pair, key=lambda client: process_of(server, client) != maker)
        found = other.get(paths[-1]).json()
        assert (found["status"] in ("queued", "in_progress"), found["background"]) == (True, True)
        assert other.get(paths[-1] + "/input_items").json()["data"][0]["content"][0]["text"] == text
        if text == "=ab":
            rest = follow(other, paths[0], 1)
            assert rest[-1]["response"]["output"][0]["content"][0]["text"] == "ab"
            assert [event["sequence_number"] for event in rest] == list(range(1, len(rest) + 1))
            assert follow(own, paths[0], 1) == follow(other, paths[0], 1) == rest
            name = paths[0].rpartition("/")[2]
            body = {"input": "=cd", "previous_response_id": name, "max_output_tokens": 16}
            assert other.post("/v1/responses", json=body).status_code == 200
        elif paths[-1] == paths[1]:
            body = {"input": "=cd", "previous_response_id": paths[1].rpartition("/")[2]}
            assert "has no end" in other.post("/v1/responses", json=body).json()["error"]["message"]
            cancelled = other.post(paths[1] + "/cancel").json()
            assert cancelled["status"] == "cancelled"
            assert own.get(paths[1]).json() == other.get(paths[1]).json() == cancelled
            assert follow(other, paths[1], 1)[-1]["response"] == cancelled
            assert follow(other, paths[1], 1000) == []
        else:
            assert other.delete(paths[2]).json()["deleted"] is True
            assert [client.get(paths[2]).status_code for client in pair] == [404, 404]
    until(lambda: own.get("/load").json()["server_load"] == 0)


@contextlib.contextmanager
def _sending(client: httpx.Client) -> Iterator[None]:
    """A request that waits in the engine's queue, whose client hangs up at the end of the block."""
    address = (client.base_url.host, client.base_url.port)
    body = json.dumps(STREAM).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer plain\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(address) as connection:
        connection.sendall(head.encode() + body)
        yield


async def pieces(client: httpx.AsyncClient, text: str) -> AsyncIterator[str]:
    """A stream that copies `text`. Raises RuntimeError with the message of an error event."""
    body = {"prompt": f"={text}", "max_tokens": len(text) + 1, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                yield event["choices"][0]["text"]


async def begun(client: httpx.AsyncClient, text: str = COPIED) -> tuple[str, asyncio.Task[str]]:
    """The beginning of a stream, and the rest of it."""
    stream = pieces(client, text)
    head = await anext(stream)

    async def rest() -> str:
        return "".join([piece async for piece in stream])

    return head, asyncio.ensure_future(rest())


@contextlib.asynccontextmanager
async def async_clients(url: str, count: int, path: Path | None = None) -> AsyncIterator[list[httpx.AsyncClient]]:
    """path: of a Unix socket."""
    limits = httpx.Limits(keepalive_expiry=None)
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(count):
            transport = None if path is None else httpx.AsyncHTTPTransport(uds=str(path), limits=limits)
            client = httpx.AsyncClient(base_url=url, transport=transport, limits=limits, timeout=GUARD_SECONDS)
            clients.append(await stack.enter_async_context(client))
        yield clients


async def test_a_killed_process_takes_its_own_requests_alone(model_path: Path, processes: list[Process]) -> None:
    """Another one takes its place, what was counted stays, and SIGTERM drains what runs in any of them."""
    process = Process(model_path, "very_slow", api_server_count=2, shutdown_timeout=1000).wait_ready()
    processes.append(process)
    async with async_clients(process.url, 3) as (first, second, third):
        response = (await first.post("/v1/responses", json={"input": LONG, "background": True})).json()
        (_, lost), (head, kept) = await begun(first, LONG), await begun(second)
        victim, survivor = process.api_processes
        victim.kill()
        with pytest.raises(httpx.TransportError):
            await lost
        assert head + await kept == COPIED
        while survivor == (newest := process.api_processes[0]) or newest.pid == victim.pid:
            await asyncio.sleep(0.02)
        failed = (await third.get(f"/v1/responses/{response['id']}")).json()
        assert (failed["status"], "has ended" in failed["error"]["message"]) == ("failed", True)
        while (await third.get("/load")).json()["server_load"]:
            await asyncio.sleep(0.02)
        idle = re.compile(r"^vllm:num_requests_running\{.*\} 0\.0$", re.MULTILINE)
        while not idle.search((await third.get("/metrics")).text):  # the lost one is aborted
            await asyncio.sleep(0.02)
        rests = [(await begun(client, LONG))[1] for client in (first, second, third)]
        process.signal(signal.SIGTERM)
        for client in (first, second, third):
            while (await client.get("/health")).status_code == 200:
                await asyncio.sleep(0.02)
            refused = await client.post("/v1/completions", json={"prompt": "=a"})
            assert (refused.status_code, "shutting down" in refused.text) == (503, True)
        for rest in rests:  # the clients hang up
            rest.cancel()
        await asyncio.gather(*rests, return_exceptions=True)
    status, error = await asyncio.to_thread(process.finish)
    assert (status, "API process 0 was killed by signal 9 (SIGKILL); another one is started" in error) == (0, True)
    assert "shutting down: 3 requests are running" in error
    assert has_ended(newest)
    assert has_ended(survivor)


@pytest.mark.long
async def test_a_stopped_process_is_ended_and_replaced(model_path: Path, processes: list[Process]) -> None:
    process = Process(model_path, "very_slow", api_server_count=2).wait_ready()
    processes.append(process)
    async with async_clients(process.url, 2) as (first, second):
        (_, lost), (head, kept) = await begun(first, LONG), await begun(second)
        victim, survivor = process.api_processes
        victim.suspend()
        with pytest.raises(httpx.TransportError):
            await lost
        assert head + await kept == COPIED
        while survivor == (newest := process.api_processes[0]) or newest.pid == victim.pid:
            await asyncio.sleep(0.02)
    process.signal(signal.SIGTERM)
    status, error = await asyncio.to_thread(process.finish)
    assert (status, "API process 0 is stopped (SIGSTOP), and is ended" in error) == (0, True)
    assert has_ended(newest)


@pytest.mark.long
async def test_after_the_timeout_all_processes_abort_what_runs(model_path: Path, processes: list[Process]) -> None:
    process = Process(model_path, "very_slow", api_server_count=2, shutdown_timeout=0.1).wait_ready()
    processes.append(process)
    async with async_clients(process.url, 2) as clients, contextlib.AsyncExitStack() as stack:
        streams = []
        for client in clients:
            response = await stack.enter_async_context(client.stream("POST", "/v1/completions", json=STREAM))
            streams.append(response.aiter_lines())
            await anext(streams[-1])
        process.signal(signal.SIGTERM)
        for stream in streams:
            rest = [line async for line in stream]
            assert rest[-2] == "data: [DONE]"
            assert '"finish_reason":"abort"' in rest[-4]
    assert (await asyncio.to_thread(process.finish))[0] == 0


@pytest.mark.long
async def test_a_killed_engine_is_heard_of_by_all(model_path: Path, tmp_path: Path, processes: list[Process]) -> None:
    """Over a Unix socket."""
    path = tmp_path / "socket"
    process = Process(model_path, "very_slow", api_server_count=2, uds=str(path)).wait_ready()
    processes.append(process)
    async with async_clients("http://localhost", 2, path) as clients:
        rests = [(await begun(client, LONG))[1] for client in clients]
        engine, api_processes = process.engine, process.api_processes
        engine.kill()
        for rest in rests:
            with pytest.raises(RuntimeError, match="SIGKILL"):
                await rest
    status, error = await asyncio.to_thread(process.finish)
    assert (status, error.count("the engine died")) == (1, 1)
    assert all(has_ended(each) for each in api_processes)
    assert not path.exists()


@pytest.mark.long
async def test_requests_go_on_in_the_next_engine(model_path: Path, processes: list[Process]) -> None:
    """In all processes; then the second signal ends all of them at once."""
    process = Process(
        model_path, "very_slow", api_server_count=2, restart_engine=True, shutdown_timeout=1000
    ).wait_ready()
    processes.append(process)
    async with async_clients(process.url, 2) as clients:
        streams = [await begun(client) for client in clients]
        process.engine.kill()
        assert [head + await rest for head, rest in streams] == [COPIED] * 2
        for client in clients:
            while "quire_engine_restarts_total 1.0" not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.02)
            assert (await client.get("/ready")).status_code == 200
        everyone = [process.engine, *process.api_processes]
        long = {"prompt": ["abc"] * 50, "max_tokens": 250}
        rests = [asyncio.ensure_future(client.post("/v1/completions", json=long)) for client in clients]
        async with httpx.AsyncClient(base_url=process.url, timeout=GUARD_SECONDS) as client:
            while (await client.get("/load")).json()["server_load"] < 2:
                await asyncio.sleep(0.02)
            process.signal(signal.SIGTERM)
            while (await client.get("/health")).status_code == 200:
                await asyncio.sleep(0.02)
            process.signal(signal.SIGTERM)
        status, _ = await asyncio.to_thread(process.finish)
        assert status == 128 + signal.SIGTERM
        await asyncio.gather(*rests, return_exceptions=True)
    assert all(has_ended(each) for each in everyone)


@pytest.mark.long
def test_processes_that_cannot_be_started_again_end_the_server(
    tmp_path: Path, model_path: Path, processes: list[Process]
) -> None:
    model = Path(shutil.copytree(model_path, tmp_path / "model"))
    process = Process(model, "readable", api_server_count=2).wait_ready()
    processes.append(process)
    (model / "tokenizer.json").write_text("{")
    process.api_processes[1].kill()
    status, error = process.finish()
    assert (status, error.count("another one is started")) == (1, 3)
    assert "error: API processes cannot be started any more: " in error
    assert "tokenizer" in error


def test_what_a_process_cannot_start_with_is_an_error_of_serve(model_path: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix.txt"
    prefix.write_text("x" * 5000)
    options = EngineOptions(model=str(model_path), num_blocks_override=64)
    settings = ServerSettings(port=0, api_server_count=2, preload_prefix=[str(prefix)])
    with pytest.raises(ConfigError, match=r"preload_prefix: .*tokens"):
        serve(options, settings, executor="tests.server.executor:readable")


@pytest.mark.parametrize("count", [0, 65])
def test_their_number_has_bounds(count: int) -> None:
    with pytest.raises(ConfigError, match="api_server_count must be between 1 and 64"):
        ServerSettings(api_server_count=count)
