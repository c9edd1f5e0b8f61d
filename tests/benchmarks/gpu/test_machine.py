"""What a run says of the cache of compiled kernels, with Triton's own loader and a driver's library of nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.kernels.triton.ahead_of_time import word_calls
from tests.kernels.triton.compiler import Compiler, compiled_environment

STUB = "\n".join(
    f"int {name}(void) {{ return 0; }}"
    for name in (
        *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain"),
        *("cuFuncSetAttribute", "cuGetErrorString", "cuPointerGetAttribute"),
    )
)
SCRIPT = """
import sys
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.driver import driver
from benchmarks.gpu.machine import cache_hits
from quire import envs
from tests.kernels.triton.cached_launches import CardOfNinety
envs.keep_triton_cache()
knobs.nvidia.libcuda_path = sys.argv[1]
card = CardOfNinety()
card.launcher_cls = CudaLauncher
driver.set_active(card)
print(cache_hits())
"""


@pytest.mark.long
def test_hits_of_the_cache(tmp_path: Path, triton_compiler: Compiler) -> None:
    """None in an empty cache, where what is missing is compiled; all in one that was filled ahead."""
    stub = tmp_path / "stub" / "libcuda.so.1"
    stub.parent.mkdir()
    subprocess.run(("gcc", "-x", "c", "-", "-shared", "-fPIC", "-o", stub), input=STUB, text=True, check=True)
    environment = compiled_environment(LD_LIBRARY_PATH=str(stub.parent))

    def hits(cache: Path) -> dict[str, object]:
        own = environment | {"QUIRE_TRITON_CACHE": str(cache)}
        command = (sys.executable, "-c", SCRIPT, str(stub.parent))
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=own)
        assert run.returncode == 0, run.stderr[-2000:]
        found: dict[str, object] = ast.literal_eval(run.stdout)
        return found

    count = len(word_calls())
    assert hits(tmp_path / "empty").items() >= {"kernels": (0, count), "launchers": (0, count)}.items()
    triton_compiler.run("ahead_of_time", "90", "words", "cache", QUIRE_TRITON_CACHE=str(tmp_path / "filled"))
    assert hits(tmp_path / "filled").items() >= {"kernels": (count, count), "launchers": (count, count)}.items()
