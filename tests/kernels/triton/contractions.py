"""Fused multiply-adds of attention, for a card that is not there: `python -m tests.kernels.triton.contractions`.

Prints a line of JSON for each kernel and setting: whether the compiler may make one instruction of a product and a
sum, and how many such instructions there are. Run without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from triton._C.libtriton import llvm
from triton.backends.compiler import Language
from triton.backends.nvidia.compiler import CUDABackend, CUDAOptions
from triton.runtime.driver import driver

from quire.kernels.triton.runtime import recorded_launches
from tests.kernels.triton.ahead_of_time import CUOBJDUMP, QWEN3_8B, LaunchingGPU, attention_call, float32

CAPABILITY = 90


class CountingRecorder:
    """Compiles each attention kernel, and its last two stages with the option again: those before do not know it."""

    def launch(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        if kernel.__name__ not in ("_varlen_kernel", "_split_kernel", "_merge_kernel"):
            return
        compiled = kernel.warmup(*args, grid=grid, **constants, enable_fp_fusion=False)
        metadata = compiled.metadata._asdict()
        options = CUDAOptions(**{each.name: hashable(metadata[each.name]) for each in fields(CUDAOptions)})
        stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
        CUDABackend(metadata["target"]).add_stages(stages, replace(options, enable_fp_fusion=True), Language.TRITON)
        contracted = stages["cubin"](stages["ptx"](compiled.asm["llir"], metadata), metadata)
        for contracts, cubin in ((False, compiled.asm["cubin"]), (True, contracted)):
            fused = fused_operations(cubin)
            print(json.dumps({"kernel": kernel.__name__, "contracts": contracts, "fused": fused}), flush=True)


def hashable(value: Any) -> Any:
    """The value, with tuples for lists: metadata was JSON."""
    return tuple(map(hashable, value)) if isinstance(value, list) else value


def fused_operations(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True)
    return run.stdout.count(" FFMA ")


def main() -> None:
    driver.set_active(LaunchingGPU(CAPABILITY))
    llvm.init_targets()  # a kernel that Triton finds in its cache has not done so
    layer = replace(QWEN3_8B, head_dim=64, window=1000, soft_cap=30.0, sinks=float32(QWEN3_8B.num_heads))
    with recorded_launches(CountingRecorder()):
        attention_call(layer, CAPABILITY, 512, fixed=True)()


if __name__ == "__main__":
    main()
