"""What all tests share: one compute thread, reproducible hypothesis, the bundled model, a check for leaks."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before torch is imported anywhere: tiny matrices gain nothing from more threads than one.
os.environ["OMP_NUM_THREADS"] = "1"
# And before Triton is: its kernels run in the interpreter wherever there is no GPU to compile them for.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
for _name in [name for name in os.environ if name.startswith("QUIRE_")]:
    del os.environ[_name]
# Engines here and in processes that tests start, unless they ask for more: threads without a core wait for each other.
os.environ["QUIRE_NUM_THREADS"] = "1"
# A directory of this run alone, so that a socket or process left behind is known to be ours.
RUNTIME_DIRECTORY = Path(tempfile.mkdtemp(prefix="quire-test-"))
os.environ["QUIRE_RUNTIME_DIR"] = str(RUNTIME_DIRECTORY)
atexit.register(shutil.rmtree, RUNTIME_DIRECTORY, ignore_errors=True)

import psutil  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

import quire  # noqa: E402
from quire.decoding import draft_numbers  # noqa: E402
from quire.utils import progress  # noqa: E402
from tests import quick_interpreter  # noqa: E402
from tests.closing_words import said, say  # noqa: E402
from tests.kernels.triton.compiler import Compiler  # noqa: E402
from tests.warm_interpreters import WarmInterpreter, close_interpreters, copied_helpers, fresh_ones  # noqa: E402

if TYPE_CHECKING:
    import torch

# A shell that starts the tests in the background may ignore interrupts, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# On a loaded machine a tiny model takes longer to load than what stays unsaid: no test's output depends on that.
progress.SHOW_AFTER_SECONDS = 86400.0
# Nor does the number of drafts in a step, but in tests of that.
draft_numbers.LEAST_SECONDS = 86400.0

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--interpreted", action="store_true", help="tests/gpu: run in Triton's interpreter what can be")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Modules and collected tests live to the end: the garbage collector need not walk their millions of objects."""
    gc.disable()
    try:
        import_own_share(session.config)
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)


def import_own_share(config: pytest.Config) -> None:
    """Let each of pytest-xdist's workers that are to collect all tests import other modules first: pytest rewrites the
    assertions of a new checkout once, where all workers would rewrite those of the same modules at the same time."""
    worker = getattr(config, "workerinput", None)
    if worker is None or config.option.file_or_dir:
        return
    paths = sorted(Path(__file__).parent.rglob("test_*.py"))[int(worker["workerid"][2:]) :: worker["workercount"]]
    for path in paths:
        # Those that fail or are left out say so when they are collected.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))


def pytest_collection_finish() -> None:
    quick_interpreter.install()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a module has left stays: engines that start collect all garbage, and would walk it each time."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["closing words"] = said(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of pytest-xdist's workers has ended."""
    say(node.config, *getattr(node, "workeroutput", {}).get("closing words", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in said(config):
        terminalreporter.write_line(line, bold="NOT run" in line)


@pytest.fixture(scope="session")
def bundled_model_path() -> Path:
    """The directory of the model that ships in the package."""
    path = Path(quire.__file__).parent / "bundled" / "quire-python-5m"
    assert (path / "config.json").is_file(), f"the bundled model is missing from {path}"
    return path


@pytest.fixture
def default_device(device: torch.device) -> Iterator[None]:
    """New tensors lie on the device under test unless they name another."""
    with device:
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where Triton kernels are tested: compiled on a GPU where there is one, else interpreted on host tensors."""
    import torch

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return torch.device("cuda" if torch.cuda.is_available() and not interpreted else "cpu")


@pytest.fixture
def fixed_order() -> Iterator[None]:
    """torch's products and functions in an order of operations that no machine chooses (tests/fixed_order.py)."""
    from tests.fixed_order import fixed_order

    with fixed_order():
        yield


@pytest.fixture(scope="module")
def fixed_order_of_module() -> Iterator[None]:
    """`fixed_order` for all tests of a module, and what they share."""
    from tests.fixed_order import fixed_order

    with fixed_order():
        yield


@pytest.fixture(scope="module")
def no_overflow_checks() -> Iterator[None]:
    """For interpreted models, whose kernels have tests of their own that look for overflow."""
    with quick_interpreter.without_overflow_checks():
        yield


@pytest.fixture(scope="session")
def warm_interpreter() -> Iterator[WarmInterpreter]:
    """What `copied_processes` copies."""
    warm = WarmInterpreter()
    yield warm
    warm.close()


@pytest.fixture(scope="module")
def copied_processes(warm_interpreter: WarmInterpreter) -> Iterator[None]:
    """Ranks and engines that the tests of a module start are copies of an interpreter that has imported torch."""
    with warm_interpreter.in_place_of_fresh_ones():
        yield


@pytest.fixture(scope="module", name="copied_helpers")
def are_helpers_copied() -> Iterator[None]:
    """What tokenises and makes masks for engines of this process are copies of an interpreter that has imported the
    libraries."""
    with copied_helpers():
        yield


@pytest.fixture
def fresh_interpreters() -> Iterator[None]:
    """Ranks and engines of a test are started as everywhere, whatever the other tests of its module do."""
    with fresh_ones():
        yield


@pytest.fixture(scope="session")
def triton_compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.close()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After the last test no process that a test started is alive, and no ipc file or directory remains."""
    yield
    close_interpreters()
    _, alive = psutil.wait_procs(started_processes(), timeout=60)
    processes = [line for process in alive if (line := description(process))]
    files = sorted(str(path.relative_to(RUNTIME_DIRECTORY)) for path in RUNTIME_DIRECTORY.rglob("*"))
    assert not processes, f"processes outlived the tests: {processes}"
    assert not files, f"files were left in the runtime directory: {files}"


def started_processes() -> list[psutil.Process]:
    """Descendants, and orphans that still carry this run's QUIRE_RUNTIME_DIR.

    Not counted: multiprocessing's resource tracker, which lives as long as the interpreter that it serves.
    """
    this = psutil.Process()
    found = {process.pid: process for process in this.children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if process.pid != this.pid and process.environ().get("QUIRE_RUNTIME_DIR") == str(RUNTIME_DIRECTORY):
                found[process.pid] = process
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    return [process for process in found.values() if "multiprocessing.resource_tracker" not in description(process)]


def description(process: psutil.Process) -> str:
    """Process id and command line; empty for one that ended (a zombie is its parent's or init's to collect)."""
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return ""
