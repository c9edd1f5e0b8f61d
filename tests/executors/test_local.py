"""Which executor runs a model in the core's own process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.executors.device import DeviceExecutor
from quire.executors.inprocess import InProcessExecutor
from quire.executors.local import make_executor
from tests.architecture.source import ROOT


def test_the_back_end_decides(bundled_model_path: Path) -> None:
    kinds = {"torch": InProcessExecutor, "triton": DeviceExecutor}
    for backend, kind in kinds.items():
        options = EngineOptions(model=str(bundled_model_path), device="cpu", attention_backend=backend)
        executor = make_executor(resolve(options))
        assert type(executor) is kind
        executor.shutdown()


def test_a_cpu_needs_no_triton() -> None:
    """The Triton packages are blocked; the executor of the CPU is there all the same."""
    script = "import sys; sys.modules['triton'] = None; import quire.executors.local as local; local.make_executor"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=200)
