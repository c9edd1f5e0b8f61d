"""Compiles what decides designs for a card that is not there. Prints a line of JSON for each launch: shared memory, and
how often instructions occur. Run without TRITON_INTERPRET."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from triton.runtime.driver import driver

from benchmarks.gpu.experiments import PRODUCT_TILES, add_one, product
from quire.kernels.triton.runtime import recorded_launches
from tests.kernels.triton.ahead_of_time import AbsentGPU, empty, float32


class Compiling:
    def launch(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        compiled = kernel.warmup(*args, grid=grid, **constants)
        counted = {word: compiled.asm["ptx"].count(word) for word in ("griddepcontrol", "wgmma.mma_async")}
        print(json.dumps({"kernel": kernel.__name__, "shared": compiled.metadata.shared, **counted}), flush=True)


def main() -> None:
    driver.set_active(AbsentGPU(90))
    with recorded_launches(Compiling()):
        for early in (False, True):
            add_one(float32(4096), early=early)
        for tiles in PRODUCT_TILES:
            product(empty(256, 4096), empty(4096, 4096), tiles)
