from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from quire.cli import main as cli
from quire.cli.main import main
from quire.errors import ConfigError, EngineDeadError, UserError
from quire.version import __version__


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Register `quire fake`, which calls the function given."""

    def register(action: Callable[[], int]) -> None:
        class Module:
            @staticmethod
            def main(arguments: list[str]) -> int:
                return action()

        monkeypatch.setitem(cli.COMMANDS, "fake", ("fake_module", "for tests"))
        monkeypatch.setitem(sys.modules, "fake_module", Module)  # type: ignore[arg-type]

    return register


def raising(error: BaseException) -> Callable[[], int]:
    def action() -> int:
        raise error

    return action


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_names_every_command(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    printed = capsys.readouterr().out
    for name in ("serve", "run", "chat", "bench", "plan", "top"):
        assert f"  {name} " in printed


def test_no_command_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: quire" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    assert capsys.readouterr().out == f"quire {__version__}\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("serv", "unknown command 'serv'; did you mean 'serve'?"),
        ("--verison", "unknown option '--verison'; did you mean '--version'?"),
        (
            "zzz",
            "unknown command 'zzz' (commands: serve, run-batch, run, chat, bench, simulate, quantize, plan, doctor, "
            "top, completion)",
        ),
    ],
)
def test_unknown_commands_are_corrected(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["serve", "run", "chat", "bench", "plan", "top"])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"usage: quire {name}" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["latency", "throughput", "serve"])
def test_every_benchmark_has_help(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert mode in capsys.readouterr().out
    assert main(["bench", mode, "--help"]) == 0
    assert f"usage: quire bench {mode}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status"),
    [(UserError("bad\nvalue"), 2), (ConfigError("bad value"), 2), (EngineDeadError("bad value"), 1)],
)
def test_errors_are_one_line(
    error: Exception,
    status: int,
    command: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(raising(error))
    assert main(["fake"]) == status
    assert capsys.readouterr().err == "quire: error: bad value\n"


def test_debug_shows_the_traceback_too(
    command: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "debug")
    command(raising(UserError("bad value")))
    assert main(["fake"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("quire: error: bad value\n")


def test_a_wrong_log_level_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "loud")
    assert main(["--version"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("quire: error: QUIRE_LOG_LEVEL must be one of")
    assert error.count("\n") == 1


def test_an_interrupt_is_quiet(
    command: Callable[[Callable[[], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(KeyboardInterrupt()))
    assert main(["fake"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == ""


class PanicException(BaseException):
    """As Rust's libraries raise it."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("bug\n\x1b[31m" + "x" * 5000), r"RuntimeError: bug \\x1b\[31mxxx.*x \.\.\."),
        (PanicException("no entry"), r"PanicException: no entry \(QUIRE_LOG_LEVEL=DEBUG shows where\)"),
        (MemoryError(), r"out of memory \(the limit of address space, `ulimit -v`, is \w+\) .*"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory .*"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 7 bytes"), "out of memory .* 7 bytes .*"),
        (ImportError("libx.so: failed to map segment from shared object"), r"out of memory .*: libx\.so: .*"),
        (OSError(errno.EMFILE, "Too many open files"), r"too many open files \(the limit, `ulimit -n`, is \w+\) .*"),
        (RuntimeError("can't start new thread"), "no more threads can be started .*"),
    ],
    ids=["bug", "panic", "memory", "ENOMEM", "torch", "import", "files", "threads"],
)
def test_unforeseen_errors_are_one_line_too(
    error: BaseException,
    message: str,
    command: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(raising(error))
    assert main(["fake"]) == 1
    assert re.fullmatch(f"quire: error: {message}\n", capsys.readouterr().err)


def test_debug_shows_where_a_bug_is(
    command: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "debug")
    command(raising(RuntimeError("bug")))
    assert main(["fake"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("quire: error: RuntimeError: bug\n")


def test_a_closed_pipe_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    # `--help` fits the buffer of stdout, so the pipe breaks when it is flushed at the end.
    done = subprocess.run(
        [sys.executable, "-m", "quire", "--help"], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 0


def test_help_and_flags_import_nothing_heavy() -> None:
    """What makes `quire --help` quick, without a clock: the modules that it must not load."""
    code = (
        "import sys; from quire.cli.main import main; main(['--help']);"
        "main(['plan', '--help']); main(['top', '--help']);"
        "heavy = {'torch', 'numpy', 'rich', 'zmq', 'fastapi', 'httpx', 'transformers', 'tokenizers', 'asyncio'};"
        "print('LOADED', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("LOADED []\n")
