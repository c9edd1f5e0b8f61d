"""The engine process: what it computes, and every way in which it or its parent can end."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import msgspec
import psutil
import pytest

from quire import envs
from quire.config.options import EngineOptions
from quire.engine import long_prompts
from quire.engine.engine_process import EngineProcess
from quire.engine.inprocess_client import InProcessClient
from quire.engine.messages import Abort, AddRequest
from quire.engine.output_window import MANY_SEQUENCES
from quire.engine.process_client import ProcessClient
from quire.errors import ConfigError, EngineDeadError, InsufficientMemoryError, ModelLoadError
from quire.utils import child_process
from quire.utils.runtime_directory import LAST_WORDS_FILE, PREFIX
from tests.engine.driving import add, call, first_update, stats, tokens_until_finished, updates_until_finished
from tests.engine.scripts import start_script
from tests.warm_interpreters import SERVERS

FAKES = "tests.fakes.factories:"


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    """Engines are copies, but those of `fresh_interpreters` and of scripts."""
    with SERVERS.in_place_of_fresh_ones():
        yield


@pytest.fixture
def client(options: EngineOptions) -> Iterator[ProcessClient]:
    client = ProcessClient(options, executor=FAKES + "slow")
    yield client
    client.shutdown()


def runtime_directories() -> list[Path]:
    return list(envs.runtime_directory().glob(f"{PREFIX}*"))


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until_gone(pid: int) -> None:
    """Until the process has ended and its directory is removed. A minute is a bound for failure, not a claim."""
    deadline = time.monotonic() + 240
    while is_running(pid) or runtime_directories():
        assert time.monotonic() < deadline, f"running: {is_running(pid)}, left: {runtime_directories()}"
        time.sleep(0.02)


def test_tokens_are_those_of_the_inline_core(options: EngineOptions, client: ProcessClient) -> None:
    inline = InProcessClient(options, executor=FAKES + "plain")
    for each in (client, inline):
        each.send(add("a", num_prompt_tokens=40))
        each.send(add("b"))
    assert tokens_until_finished(client, "a", "b") == tokens_until_finished(inline, "a", "b")
    assert msgspec.structs.replace(client.ready, seconds={}) == msgspec.structs.replace(inline.ready, seconds={})
    # How many steps it took depends on whether the second message arrived before the first step.
    assert msgspec.structs.replace(stats(client), steps_total=0) == msgspec.structs.replace(
        stats(inline), steps_total=0
    )
    assert call(client, "nonsense").error == call(inline, "nonsense").error != None  # noqa: E711


def test_a_prompt_that_is_sent_in_pieces_is_that_of_the_inline_core(
    options: EngineOptions, client: ProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_prompts, "PIECE_TOKENS", 8)
    inline = InProcessClient(options, executor=FAKES + "plain")
    for each in (client, inline):
        each.send(add("long", num_prompt_tokens=41))
        each.send(add("short"))
    tokens = tokens_until_finished(client, "long", "short")
    assert tokens == tokens_until_finished(inline, "long", "short")
    assert stats(client).prompt_tokens_total == 46


def test_tokens_of_several_steps_come_at_once(options: EngineOptions) -> None:
    names = [f"r{number}" for number in range(MANY_SEQUENCES)]
    client = ProcessClient(msgspec.structs.replace(options, output_window=1.0), executor=FAKES + "plain")
    inline = InProcessClient(options, executor=FAKES + "plain")
    try:
        for each in (client, inline):
            each.send(*(add(name, max_tokens=7) for name in names))
        updates = updates_until_finished(client, *names)
        expected = tokens_until_finished(inline, *names)
        for name in names:
            mine = [update.new_token_ids for update in updates if update.request_id == name]
            assert [token_id for some in mine for token_id in some] == expected[name]
        first, *others = [update for update in updates if update.request_id == names[0]]
        assert len(first.new_token_ids) == 1
        assert len(others) < 6
        alone = msgspec.structs.replace(add(names[0], max_tokens=7).request, each_step=True)
        client.send(AddRequest(alone), *(add(name, max_tokens=7) for name in names[1:]))
        assert all(len(update.new_token_ids) == 1 for update in updates_until_finished(client, *names))
    finally:
        client.shutdown()


def test_messages_from_many_threads_all_arrive(client: ProcessClient) -> None:
    names = [f"r{index}" for index in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: client.send(add(name)), names))
    assert all(len(tokens) == 6 for tokens in tokens_until_finished(client, *names).values())


def test_abort_frees_the_blocks(client: ProcessClient) -> None:
    client.send(add("a", max_tokens=1000))
    first_update(client)
    assert stats(client).num_used_blocks > 0
    client.send(Abort("a"))
    assert stats(client).num_used_blocks == 0


def test_directory_is_private_and_nothing_listens_on_a_network(client: ProcessClient) -> None:
    assert client.ready.num_blocks == 256
    (directory,) = runtime_directories()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for process in (psutil.Process(client.pid), psutil.Process()):
        assert not [
            connection
            for connection in process.net_connections("inet")
            if connection.laddr.port and connection.status == psutil.CONN_LISTEN
        ]


def test_idle_process_sleeps(client: ProcessClient) -> None:
    client.send(add("a"))
    tokens_until_finished(client, "a")
    process = psutil.Process(client.pid)
    deadline, used = time.monotonic() + 240, 1.0
    while used > 0.0:  # what is left of the request; one that polls never gets there
        assert time.monotonic() < deadline, "the engine process polls while it has nothing to do"
        before = sum(process.cpu_times()[:2])
        time.sleep(0.3)
        used = sum(process.cpu_times()[:2]) - before


def test_receive_times_out_when_idle(client: ProcessClient) -> None:
    assert client.receive(0.01) is None


def test_shutdown_is_clean_and_idempotent(client: ProcessClient) -> None:
    client.send(add("a", max_tokens=1000))
    first_update(client)
    client.shutdown()
    client.shutdown()
    assert not is_running(client.pid)
    assert not runtime_directories()
    for action in (client.receive, lambda: client.send(add("b"))):
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            action()


def test_shutdown_wakes_a_waiting_receive(client: ProcessClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert client.ready
        received = pool.submit(client.receive)
        client.shutdown()
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            received.result(60)


def test_shutdown_kills_a_process_that_does_not_answer(options: EngineOptions) -> None:
    client = ProcessClient(options, executor=FAKES + "stuck_step")
    client.send(add("a"))
    assert client.receive(0.2) is None
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(client.shutdown, timeout=1.0)
        while not client._closed:
            time.sleep(0.001)
        client.shutdown(timeout=0.1)  # that of another thread has begun
        assert not is_running(client.pid)
        assert not runtime_directories()
        ending.result(60)


def test_kill_9_fails_the_waiting_receive_and_leaves_nothing(client: ProcessClient) -> None:
    client.send(add("a", max_tokens=1000))
    first_update(client)
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"killed by signal 9 \(SIGKILL\): out of memory\?"):
        tokens_until_finished(client, "a")
    assert not is_running(client.pid)
    assert not runtime_directories()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.send(add("b"))


def test_a_crash_names_the_signal_and_the_place(options: EngineOptions) -> None:
    client = ProcessClient(options, executor=FAKES + "crashing_step")
    client.send(add("a"))
    with pytest.raises(EngineDeadError, match=r"signal 11 \(SIGSEGV\): in File .*read_address_zero") as caught:
        tokens_until_finished(client, "a")
    assert caught.value.summary == "the engine process was killed by signal 11 (SIGSEGV)", "what clients may read"
    assert not runtime_directories()
    client.shutdown()


def test_a_failing_step_is_named_with_its_cause(options: EngineOptions) -> None:
    client = ProcessClient(options, executor=FAKES + "failing_step")
    client.send(add("a"))
    with pytest.raises(EngineDeadError, match="RuntimeError: injected failure at step 3") as caught:
        tokens_until_finished(client, "a")
    assert caught.value.summary == "the engine process failed"
    with pytest.raises(EngineDeadError) as again:
        client.send(add("b"))
    assert again.value.error_id == caught.value.error_id, "one failure, one record in the log"
    assert not is_running(client.pid)
    client.shutdown()


@pytest.mark.parametrize(
    ("changes", "error_type", "message"),
    [
        ({"model": "/no/such/model"}, ModelLoadError, "/no/such/model"),
        ({"block_size": 12}, ConfigError, "block_size must be a power of two"),
        ({"num_blocks_override": None, "kv_cache_memory": 1}, InsufficientMemoryError, "kv_cache_memory"),
    ],
)
def test_a_mistake_in_the_options_comes_back_as_itself(
    options: EngineOptions, changes: dict[str, object], error_type: type[Exception], message: str
) -> None:
    client = ProcessClient(msgspec.structs.replace(options, **changes), executor=FAKES + "plain")
    with pytest.raises(error_type, match=message) as caught:
        _ = client.ready
    assert getattr(caught.value, "param", None) in (None, "block_size")
    assert not is_running(client.pid)
    assert not runtime_directories()
    with pytest.raises(error_type):
        client.receive()
    client.shutdown()


def test_a_mistake_in_the_environment_is_one_clear_line(
    options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "LOUD")
    client = ProcessClient(options, executor=FAKES + "plain")
    with pytest.raises(ConfigError, match="QUIRE_LOG_LEVEL must be one of"):
        _ = client.ready
    client.shutdown()


def test_a_failing_start_is_named_with_its_cause(options: EngineOptions) -> None:
    client = ProcessClient(options, executor=FAKES + "failing_load")
    with pytest.raises(EngineDeadError, match="could not start: RuntimeError: injected failure of the load"):
        _ = client.ready
    client.shutdown()


def test_a_process_that_cannot_even_report_leaves_its_last_words(tmp_path: Path) -> None:
    """As where there are too few files for a socket."""
    code = (
        "import quire.engine.process as process; process.main = lambda line: 1 / 0\n"
        "from quire.engine.boot import main; main()"
    )
    line = "[]\n" + json.dumps({"directory": str(tmp_path)}) + "\n"
    done = subprocess.run([sys.executable, "-c", code], input=line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert (tmp_path / LAST_WORDS_FILE).read_text() == "ZeroDivisionError: division by zero"


def test_what_it_imports_while_it_waits_may_fail(tmp_path: Path) -> None:
    lines = '["quire.no_such_module"]\n' + json.dumps({"directory": str(tmp_path)}) + "\n"
    command = [sys.executable, "-m", "quire.engine.boot"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "No module named 'quire.no_such_module'" in (tmp_path / LAST_WORDS_FILE).read_text()


def test_a_process_waits_for_its_options(options: EngineOptions, fresh_interpreters: None) -> None:
    with EngineProcess(imports=["wave"]) as process:
        client = ProcessClient(options, executor=FAKES + "plain", process=process)
    assert client.pid == process.popen.pid
    assert client.ready.num_blocks > 0
    client.shutdown()
    assert not is_running(client.pid)


def test_a_process_that_is_told_nothing_ends_with_its_context() -> None:
    with pytest.raises(ZeroDivisionError), EngineProcess() as process:
        _ = 1 / 0
    assert not is_running(process.popen.pid)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(process.alive_fd)


def test_the_last_words_are_the_cause(
    options: EngineOptions,
    fresh_interpreters: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    boot = child_process._BOOT.replace("; main()", "; import zmq; zmq.Context = lambda: 1 / 0; main()")
    monkeypatch.setattr(child_process, "_BOOT", boot)
    client = ProcessClient(options, executor=FAKES + "plain")
    with pytest.raises(EngineDeadError, match="the engine process failed: ZeroDivisionError: division by zero"):
        _ = client.ready
    client.shutdown()
    assert "Traceback" not in capfd.readouterr().err


def test_a_start_that_hangs_ends_at_its_timeout(options: EngineOptions) -> None:
    client = ProcessClient(options, executor=FAKES + "stuck_load", startup_timeout=0.1)
    with pytest.raises(EngineDeadError, match=r"not ready after 0\.1 s"):
        _ = client.ready
    assert not is_running(client.pid)
    client.shutdown()


def test_shutdown_during_the_start(options: EngineOptions) -> None:
    client = ProcessClient(options, executor=FAKES + "stuck_load")
    client.shutdown()
    assert not is_running(client.pid)
    assert not runtime_directories()


def test_sigterm_lets_running_requests_finish(client: ProcessClient) -> None:
    client.send(add("a", max_tokens=20))
    tokens = first_update(client).new_token_ids
    os.kill(client.pid, signal.SIGTERM)
    assert len(tokens + tokens_until_finished(client, "a")["a"]) == 20
    with pytest.raises(EngineDeadError, match="SIGTERM"):
        client.receive(30)
    assert not is_running(client.pid)


def test_sigterm_when_idle_ends_the_process(client: ProcessClient) -> None:
    assert client.ready
    os.kill(client.pid, signal.SIGTERM)
    with pytest.raises(EngineDeadError, match="SIGTERM"):
        client.receive(30)


def test_sigint_is_the_parents_business(client: ProcessClient) -> None:
    client.send(add("a", max_tokens=20))
    tokens = first_update(client).new_token_ids
    os.kill(client.pid, signal.SIGINT)
    assert len(tokens + tokens_until_finished(client, "a")["a"]) == 20


PARENT = """
import sys, time
from quire.config.options import EngineOptions
from quire.engine.process_client import ProcessClient

client = ProcessClient(EngineOptions(model=sys.argv[1], num_blocks_override=128), executor="tests.fakes.factories:slow")
print(client.ready.num_blocks, client.pid, flush=True)
if sys.argv[2] == "stay":
    time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_parent_takes_the_process_along(tmp_path: Path, weightless_model: Path, number: signal.Signals) -> None:
    with start_script(tmp_path / "parent.py", PARENT, str(weightless_model), "stay") as parent:
        assert parent.stdout is not None
        num_blocks, pid = map(int, parent.stdout.readline().split())
        assert num_blocks == 128
        assert is_running(pid)
        parent.send_signal(number)
        parent.communicate(timeout=240)
    wait_until_gone(pid)


def test_parent_that_just_ends_leaves_nothing(tmp_path: Path, weightless_model: Path) -> None:
    with start_script(tmp_path / "parent.py", PARENT, str(weightless_model), "leave") as parent:
        output, errors = parent.communicate(timeout=240)
        assert (parent.returncode, errors) == (0, "")
    wait_until_gone(int(output.split()[1]))


def test_parent_killed_during_the_start(tmp_path: Path, weightless_model: Path) -> None:
    source = PARENT.replace("factories:slow", "factories:stuck_load").replace("client.ready.num_blocks", "128")
    with start_script(tmp_path / "parent.py", source, str(weightless_model), "stay") as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().split()[1])
        parent.kill()
        parent.communicate(timeout=240)
    wait_until_gone(pid)


def test_a_parent_that_ends_before_it_spoke_is_no_error() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "quire.engine.boot"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert (process.returncode, process.stderr) == (0, b"")


@pytest.mark.parametrize("step", ["__init__", "tell"])
def test_a_process_that_cannot_be_started_leaves_nothing(
    options: EngineOptions, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = set(psutil.Process().children())
    monkeypatch.setattr(EngineProcess, step, Mock(side_effect=OSError("no memory")))
    with pytest.raises(OSError, match="no memory"):
        ProcessClient(options, executor=FAKES + "slow")
    assert not runtime_directories()
    assert set(psutil.Process().children()) == before
