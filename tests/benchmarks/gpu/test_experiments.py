"""What decides designs compiles for a card that is not there: the interpreter does not see options of the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT
from tests.kernels.triton.test_ahead_of_time import SHARED_BYTES

COMPILE = """
import json
from triton.runtime.driver import driver
from tests.kernels.triton.ahead_of_time import AbsentGPU, empty, float32
driver.set_active(AbsentGPU(90))
from benchmarks.gpu.experiments import PRODUCT_TILES, add_one, product
from quire.kernels.triton.runtime import recorded_launches

class Compiling:
    def launch(self, kernel, grid, args, constants):
        compiled = kernel.warmup(*args, grid=grid, **constants)
        counted = {word: compiled.asm["ptx"].count(word) for word in ("griddepcontrol", "wgmma.mma_async")}
        print(json.dumps({"kernel": kernel.__name__, "shared": compiled.metadata.shared, **counted}), flush=True)

with recorded_launches(Compiling()):
    for early in (False, True):
        add_one(float32(4096), early=early)
    for tiles in PRODUCT_TILES:
        product(empty(256, 4096), empty(4096, 4096), tiles)
"""


@pytest.mark.long
def test_experiments_compile_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    launches = [json.loads(line) for line in run.stdout.splitlines()]
    assert [launch["griddepcontrol"] for launch in launches[:2]] == [0, 2]
    products = launches[2:]
    assert len(products) == 6
    assert all(launch["wgmma.mma_async"] > 0 for launch in products)
    assert max(launch["shared"] for launch in products) <= SHARED_BYTES[90]
