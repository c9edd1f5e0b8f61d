"""`serve` as a process: ready, drained, killed, refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest
from fastapi import FastAPI

from quire.config.options import EngineOptions
from quire.errors import ConfigError
from quire.server.http_protocol import make_http_server
from quire.server.listener import CertificateWatch, bind, check_certificate
from quire.server.run import serve
from quire.server.settings import ServerSettings
from tests.long import all_but_long
from tests.processes import has_ended
from tests.server.serve_process import LONG, Process


def test_ready_line_phases_and_a_clean_end(
    model_path: Path, processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what systemd hears of them, at an abstract address."""
    systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    systemd.settimeout(120)
    systemd.bind(f"\0quire-{uuid.uuid4().hex}")
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.getsockname().decode().replace("\0", "@"))
    settings = {"served_model_name": ["tiny"], "access_log": True, "enable_admin_routes": True}
    process = Process(model_path, "readable", is_fresh=True, **settings)
    processes.append(process)
    process.wait_ready()
    assert systemd.recv(100) == b"READY=1"
    engine = process.engine
    with httpx.Client(base_url=process.url, timeout=60) as client:
        assert client.get("/health").status_code == 200
        start_seconds = client.get("/server_info").json()["start_seconds"]
        answer = client.post("/v1/completions", json={"prompt": "=abc"}).json()
        assert answer["choices"][0]["text"] == "abc"
    process.signal(signal.SIGTERM)
    assert systemd.recv(100) == b"STOPPING=1"
    systemd.close()
    status, error = process.finish()
    assert status == 0, error
    assert has_ended(engine)
    assert '"GET /health HTTP/1.1" 200' in error
    assert '"POST /v1/completions HTTP/1.1" 200' in error
    first, backend, *phases = process.output.splitlines()
    assert first.startswith("Quire ")
    assert "tiny" in first
    assert "ready in" in first
    assert backend.strip() == "fake executor"
    assert {"import web server", "engine: load model"} <= start_seconds.keys()
    assert [row.split(" s  ")[1] for row in phases] == list(start_seconds)


async def test_sigterm_drains(model_path: Path, processes: list[Process]) -> None:
    """/health turns 503, new requests are refused, the running one ends by itself, then the process exits with 0."""
    process = Process(model_path).wait_ready()
    processes.append(process)
    async with httpx.AsyncClient(base_url=process.url, timeout=60) as client:
        async with client.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.aiter_lines()
            await anext(lines)
            process.signal(signal.SIGTERM)
            while (await client.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
            assert (await client.get("/health")).status_code == 503
            refused = await client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
            process.hurry()
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-4]
    assert process.finish()[0] == 0


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def stuck_pipe() -> int:
    """The writer's end of a full pipe that is not read; its reader lives as long as this process."""
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    return writer


def pipe_without_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


async def drain(process: Process, send: Callable[[], None]) -> None:
    """Send signals while a stream runs: the server takes no more requests, and the stream comes whole."""
    async with httpx.AsyncClient(base_url=process.url, timeout=60) as client:
        async with client.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.aiter_lines()
            await anext(lines)
            send()
            while (await client.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
            process.hurry()
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"


@pytest.mark.parametrize(
    ("make_stderr", "num_processes"),
    [
        pytest.param(full_disk, 1, marks=pytest.mark.long),
        (stuck_pipe, 1),
        (pipe_without_reader, 1),
        pytest.param(full_disk, 2, marks=pytest.mark.long),
        pytest.param(stuck_pipe, 2, marks=pytest.mark.long),
        pytest.param(pipe_without_reader, 2, marks=pytest.mark.long),
    ],
)
async def test_a_log_that_cannot_be_written_ends_no_stream(
    model_path: Path, processes: list[Process], make_stderr: Callable[[], int], num_processes: int
) -> None:
    stderr = make_stderr()
    logged = {"access_log": True, "enable_log_requests": True, "api_server_count": num_processes}
    process = Process(model_path, stderr=stderr, **logged)
    os.close(stderr)
    processes.append(process.wait_ready())
    await drain(process, lambda: process.signal(signal.SIGTERM))
    assert process.finish()[0] == 0


@contextlib.contextmanager
def sighup(handler: signal.Handlers) -> Iterator[None]:
    """Let processes that are started meanwhile inherit this for SIGHUP."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("num_processes", all_but_long([1, 2], [1]))
async def test_the_end_of_a_terminal_drains_and_ends_no_process_before(
    model_path: Path, processes: list[Process], num_processes: int
) -> None:
    with sighup(signal.SIG_DFL):  # the tests may run where it is ignored
        process = Process(model_path, api_server_count=num_processes)
    processes.append(process.wait_ready())

    def hang_up() -> None:
        for child in (process.engine, *process.api_processes):
            child.send_signal(signal.SIGHUP)
        process.signal(signal.SIGHUP)

    await drain(process, hang_up)
    status, error = process.finish()
    assert (status, "shutting down" in error) == (0, True)


async def test_a_server_that_was_started_to_outlive_its_terminal_does(
    model_path: Path, processes: list[Process]
) -> None:
    with sighup(signal.SIG_IGN):
        process = Process(model_path, "readable")
    processes.append(process.wait_ready())
    process.signal(signal.SIGHUP)
    assert httpx.get(f"{process.url}/health", timeout=60).status_code == 200
    process.signal(signal.SIGTERM)
    status, error = process.finish()
    assert (status, error.count("shutting down")) == (0, 1)


async def test_after_the_timeout_running_requests_end_with_abort(model_path: Path, processes: list[Process]) -> None:
    process = Process(model_path, shutdown_timeout=0.1).wait_ready()
    processes.append(process)
    async with (
        httpx.AsyncClient(base_url=process.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=LONG) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        process.signal(signal.SIGINT)
        rest = [line async for line in lines]
    assert rest[-2] == "data: [DONE]"
    assert '"finish_reason":"abort"' in rest[-4]
    assert process.finish()[0] == 0


async def test_a_second_signal_leaves_at_once(model_path: Path, processes: list[Process]) -> None:
    process = Process(model_path, shutdown_timeout=1000).wait_ready()
    processes.append(process)
    engine = process.engine
    async with (
        httpx.AsyncClient(base_url=process.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json={**LONG, "prompt": ["abc"] * 50}) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        process.signal(signal.SIGTERM)
        while (await client.get("/health")).status_code == 200:
            await asyncio.sleep(0.01)
        process.signal(signal.SIGTERM)
        status, _ = await asyncio.to_thread(process.finish)
    assert status == 128 + signal.SIGTERM
    assert has_ended(engine)


@pytest.mark.parametrize("number", all_but_long([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_a_signal_while_starting(model_path: Path, processes: list[Process], number: int) -> None:
    process = Process(model_path, "never_ready")
    processes.append(process)
    while not psutil.Process(process.popen.pid).children():
        assert process.popen.poll() is None
    engine = process.engine
    process.signal(number)
    assert process.finish()[0] == 128 + number
    assert has_ended(engine)


async def test_a_killed_engine(model_path: Path, processes: list[Process]) -> None:
    """Waiting calls fail at once and say why, /health turns 503, the exit status is not zero."""
    process = Process(model_path).wait_ready()
    processes.append(process)
    async with httpx.AsyncClient(base_url=process.url, timeout=60) as client:
        whole = asyncio.ensure_future(client.post("/v1/completions", json={**LONG, "stream": False}))
        async with client.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.aiter_lines()
            await anext(lines)
            process.engine.kill()
            rest = [line async for line in lines]
        assert "SIGKILL" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
        failed = await whole
        assert failed.status_code == 503
        assert "SIGKILL" in failed.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 503
    status, error = process.finish()
    assert "HTTP/1.1" not in error, "accesses are logged only when asked"
    assert status == 1
    error_id = re.search(r"\(error ([0-9a-f]{12}); the server's log says more\)", failed.text)
    assert error_id is not None
    assert f"error {error_id[1]}: the engine died: the engine process was killed by signal 9 (SIGKILL)" in error


def test_connections_that_send_nothing_do_not_hold_up_the_end(model_path: Path, processes: list[Process]) -> None:
    process = Process(model_path, "readable").wait_ready()
    processes.append(process)
    address = ("127.0.0.1", int(process.url.rpartition(":")[2]))
    half_body = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n"
    half_body += b"content-type: application/json\r\ncontent-length: 9\r\n\r\n{"
    clients = [socket.create_connection(address) for _ in range(12)]
    for client, data in zip(clients, (b"", b"GET / HT", half_body) * 4, strict=True):
        client.sendall(data)
    assert httpx.get(f"{process.url}/health").status_code == 200
    process.signal(signal.SIGTERM)
    assert process.popen.wait(60) == 0
    for client in clients:
        client.close()


def test_an_engine_that_cannot_start_is_an_error_of_serve(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        serve(EngineOptions(block_size=3), ServerSettings(port=0))


class TestBind:
    def test_port_in_use(self) -> None:
        with bind(ServerSettings(port=0)) as taken:
            taken.listen()
            port = taken.socket.getsockname()[1]
            with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is already in use") as caught:
                bind(ServerSettings(port=port))
        assert caught.value.param == "port"

    def test_unknown_host(self) -> None:
        with pytest.raises(ConfigError) as caught:
            bind(ServerSettings(host="no.such.host.invalid"))
        assert caught.value.param == "host"

    def test_an_address_of_another_machine(self) -> None:
        with pytest.raises(ConfigError, match=r"cannot listen on port 0 of 192\.0\.2\.1"):
            bind(ServerSettings(host="192.0.2.1", port=0))

    def test_no_client_can_connect_before_the_server_listens(self) -> None:
        with bind(ServerSettings(port=0)) as listener, pytest.raises(ConnectionRefusedError):
            socket.create_connection(listener.socket.getsockname())

    def test_of_two_servers_that_were_bound_before_either_listened_one_listens(self) -> None:
        with bind(ServerSettings(port=0)) as first:
            port = first.socket.getsockname()[1]
            with bind(ServerSettings(port=port)) as second:
                second.listen()
                with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is already in use") as caught:
                    first.listen()
                socket.create_connection(second.socket.getsockname()).close()
        assert caught.value.param == "port"

    def test_a_server_whose_file_another_one_has_replaced_does_not_listen_and_leaves_the_file(
        self, tmp_path: Path
    ) -> None:
        settings = ServerSettings(uds=str(tmp_path / "socket"))
        with bind(settings) as first, bind(settings) as second:
            second.listen()
            with pytest.raises(ConfigError, match="another server has replaced it") as caught:
                first.listen()
            assert caught.value.param == "uds"
            first.__exit__()
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.connect(str(settings.uds))
            with pytest.raises(ConfigError, match="it is already in use"):
                bind(settings)
        assert not Path(str(settings.uds)).exists()


@pytest.mark.parametrize("num_processes", all_but_long([1, 2], [1]))
def test_of_two_servers_started_together_on_one_port_one_is_ready_and_the_other_ends(
    model_path: Path, processes: list[Process], num_processes: int
) -> None:
    with bind(ServerSettings(port=0)) as kept:  # bound, so that nothing else is given the number
        port = kept.socket.getsockname()[1]
        both = [Process(model_path, "readable", port=port, api_server_count=num_processes) for _ in range(2)]
        processes += both
        lines = [process.popen.stdout.readline() for process in both if process.popen.stdout is not None]
    is_ready = [" serves " in line for line in lines]
    assert sorted(is_ready) == [False, True]
    loser, winner = both[is_ready.index(False)].popen, both[is_ready.index(True)]
    assert f"port {port} on 127.0.0.1 is already in use" in loser.communicate()[1].splitlines()[-1]
    assert loser.returncode != 0
    assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200
    winner.signal(signal.SIGTERM)
    assert winner.finish()[0] == 0


ELLIPTIC = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def make_certificate(folder: Path, kind: Sequence[str] = ELLIPTIC) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    key, certificate = str(folder / "key.pem"), str(folder / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", *kind, "-nodes"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def der(path: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(path).read_text())


def shown_certificate(server: ssl.SSLContext, own: Sequence[str]) -> bytes | None:
    """What a client sees that shows its own pair and takes any certificate. Raises SSLError if the server refuses."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.load_cert_chain(*own)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
    for _ in range(4):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends[0].getpeercert(binary_form=True)


class TestTls:
    @pytest.fixture
    def certificate(self, tmp_path: Path) -> tuple[str, str]:
        return make_certificate(tmp_path)

    @pytest.mark.parametrize("count", all_but_long([1, 2], [1]))
    def test_https(self, model_path: Path, processes: list[Process], certificate: tuple[str, str], count: int) -> None:
        files = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]}
        process = Process(model_path, "readable", api_server_count=count, **files)
        processes.append(process.wait_ready())
        assert process.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=certificate[0])
        with pytest.raises(httpx.TransportError):
            httpx.get(process.url.replace("https", "http"), timeout=60)
        with httpx.Client(base_url=process.url, verify=context, timeout=60) as client:
            assert client.get("/health").status_code == 200
        process.signal(signal.SIGTERM)
        assert process.finish()[0] == 0

    def test_clients_need_a_certificate(
        self, model_path: Path, tmp_path: Path, processes: list[Process], certificate: tuple[str, str]
    ) -> None:
        """With the authority's certificate as the client's own: one that another authority signed is refused, and so
        is none."""
        own, other = certificate, (str(tmp_path / "other.pem"), str(tmp_path / "other-key.pem"))
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-subj", "/CN=other", "-keyout", other[1], "-out", other[0]]
        subprocess.run(command, check=True, capture_output=True)
        process = Process(
            model_path,
            "readable",
            ssl_certfile=own[0],
            ssl_keyfile=own[1],
            ssl_ca_certs=own[0],
            ssl_cert_reqs=int(ssl.CERT_REQUIRED),
        )
        processes.append(process.wait_ready())
        answers = []
        for pair in (own, other, None):
            context = ssl.create_default_context(cafile=own[0])
            if pair is not None:
                context.load_cert_chain(*pair)
            with httpx.Client(base_url=process.url, verify=context, timeout=60) as client:
                try:
                    answers.append(client.get("/health").status_code)
                except httpx.TransportError:
                    answers.append(0)
        assert answers == [200, 0, 0]
        process.signal(signal.SIGTERM)
        assert process.finish()[0] == 0

    @pytest.mark.parametrize("count", all_but_long([1, 2], [1]))
    def test_a_renewed_certificate(
        self, model_path: Path, tmp_path: Path, processes: list[Process], certificate: tuple[str, str], count: int
    ) -> None:
        """New connections get it, the open one goes on; SIGHUP, which scripts send after a renewal, ends nothing."""
        (tmp_path / "new").mkdir()
        new = make_certificate(tmp_path / "new")
        before, after = (ssl.create_default_context(cafile=files[0]) for files in (certificate, new))
        files = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1], "enable_ssl_refresh": True}
        with sighup(signal.SIG_DFL):
            process = Process(model_path, "readable", api_server_count=count, start_new_session=True, **files)
        processes.append(process.wait_ready())

        def is_taken(context: ssl.SSLContext) -> bool:
            try:
                return httpx.get(f"{process.url}/health", verify=context, timeout=60).status_code == 200
            except httpx.ConnectError:
                return False

        with httpx.Client(base_url=process.url, verify=before, timeout=60) as client:
            assert client.get("/health").status_code == 200
            assert is_taken(before)
            for renewed, path in zip(new, certificate, strict=True):
                Path(renewed).replace(path)
            process.signal(signal.SIGHUP)
            while not all(is_taken(after) for _ in range(4 * count)):  # new connections go to each process
                assert client.get("/health").status_code == 200, "the open connection goes on"
            assert not is_taken(before)
            assert client.get("/health").status_code == 200
        process.signal(signal.SIGTERM)
        assert process.finish()[0] == 0

    def test_files_that_do_not_fit_together_renew_nothing(
        self, tmp_path: Path, certificate: tuple[str, str], caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "new").mkdir()
        new = make_certificate(tmp_path / "new")
        settings = ServerSettings(ssl_certfile=certificate[0], ssl_keyfile=certificate[1], enable_ssl_refresh=True)
        watch, context = CertificateWatch(settings), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        assert not watch.check(context)
        Path(new[1]).replace(certificate[1])
        assert [watch.check(context), watch.check(context)] == [False, False]
        assert len([record for record in caplog.records if "is not renewed: ssl_certfile" in record.message]) == 1
        Path(new[0]).replace(certificate[0])
        assert [watch.check(context), watch.check(context)] == [True, False]
        Path(certificate[0]).unlink()
        assert not watch.check(context)
        with pytest.raises(ConfigError, match="enable_ssl_refresh need ssl_certfile"):
            ServerSettings(enable_ssl_refresh=True)

    def test_a_renewed_certificate_of_another_kind_replaces_the_first(
        self, tmp_path: Path, certificate: tuple[str, str]
    ) -> None:
        """The first one and its authority are gone, also for clients that name no server."""
        (tmp_path / "new").mkdir()
        new = make_certificate(tmp_path / "new", ["rsa:2048"])
        authority = tmp_path / "authority.pem"
        authority.write_bytes(Path(certificate[0]).read_bytes())
        settings = ServerSettings(
            ssl_certfile=certificate[0], ssl_keyfile=certificate[1], ssl_ca_certs=str(authority),
            ssl_cert_reqs=int(ssl.CERT_REQUIRED), enable_ssl_refresh=True,
        )  # fmt: skip
        old = tuple(str(tmp_path / f"old-{number}.pem") for number in range(2))
        for path, copy in zip(certificate, old, strict=True):
            Path(copy).write_bytes(Path(path).read_bytes())
        server = make_http_server(FastAPI(), settings, shutdown_grace_seconds=1)
        server.config.load()
        context, watch = server.config.ssl, CertificateWatch(settings)
        assert context is not None
        assert shown_certificate(context, old) == der(old[0])
        authority.write_bytes(Path(new[0]).read_bytes())
        for made, path in zip(new, certificate, strict=True):
            Path(path).write_bytes(Path(made).read_bytes())
        assert watch.check(context)
        assert shown_certificate(context, new) == der(new[0])
        with pytest.raises(ssl.SSLError, match="certificate verify failed"):
            shown_certificate(context, old)

    def test_files_that_are_no_certificate(self, tmp_path: Path, certificate: tuple[str, str]) -> None:
        (tmp_path / "junk").write_text("junk")
        for cert, key in (("absent", certificate[1]), (str(tmp_path / "junk"), certificate[1]), certificate[::-1]):
            with pytest.raises(ConfigError) as caught:
                check_certificate(ServerSettings(ssl_certfile=cert, ssl_keyfile=key))
            assert caught.value.param == "ssl_certfile"
            assert "\n" not in caught.value.message
        check_certificate(ServerSettings(ssl_certfile=certificate[0], ssl_keyfile=certificate[1]))


def test_preloaded_prefixes_are_registered_before_the_server_is_ready(
    model_path: Path, tmp_path: Path, processes: list[Process]
) -> None:
    paths = []
    for number, text in enumerate(("You are a helpful assistant.", "Answer in verse: ")):
        paths.append(tmp_path / f"prefix{number}.txt")
        paths[-1].write_text(text)
    process = Process(model_path, "readable", preload_prefix=[str(path) for path in paths])
    processes.append(process)
    process.wait_ready()
    metrics = httpx.get(f"{process.url}/metrics").text
    assert re.search(r"^quire_kv_blocks_registered\{.*\} 4\.0$", metrics, re.MULTILINE), "two blocks each"
    body = {"prompt": "Answer in verse: why?", "max_tokens": 2}
    usage = httpx.post(f"{process.url}/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == len("Answer in verse: ") + 1, "and the start token"
    process.signal(signal.SIGTERM)
    assert process.popen.wait(60) == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot read"), (b"", "is empty"), (b"\xff", "not valid UTF-8"), (b"x" * 300, "tokens")],
)
def test_a_prefix_that_cannot_be_loaded_is_an_error_of_serve(
    model_path: Path, tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "prefix.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        serve(
            EngineOptions(model=str(model_path), num_blocks_override=64),
            ServerSettings(port=0, preload_prefix=[str(path)]),
            executor="tests.server.executor:readable",
        )
    assert caught.value.param == "preload_prefix"
    assert str(path) in caught.value.message
