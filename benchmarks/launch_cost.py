"""What a launch costs the host, without a card: everything runs but the driver, whose calls a stub answers.

    python benchmarks/launch_cost.py [--rounds 2000]

Prints microseconds for each kernel of a decode layer of Qwen3-8B, launched by Triton (`kernel[grid](...)`) and by
Quire, and for a layer's whole `attend`. Needs a C compiler, which builds the stub and Triton's launchers. Kernels are
compiled for compute capability 9.0; nothing is computed, tensors lie in the host's memory and are not touched.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

STUB = """
int cuLaunchKernelEx(void *config, void *function, void **params, void **extra) { return 0; }
int cuPointerGetAttribute(unsigned long long *out, int which, unsigned long long pointer) { *out = pointer; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *) 1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *) 1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "stub"; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
"""
NAME = "libcuda.so.1"
BOUND_PER_LAYER = {"pages", "part_values", "part_maxima", "part_totals", "sinks", "scale", "cap", "window"}
BOUND_PER_LAYER |= {"query_weight", "key_weight", "epsilon"}
"""Arguments of attention kernels that the back end binds once for a layer."""


def build_stub(directory: Path) -> None:
    """Make the stub known: to the linker, and to code that opens a library of its name."""
    source = directory / "stub.c"
    source.write_text(STUB)
    compiler = os.environ.get("CC", "gcc")
    subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", directory / NAME, source], check=True)
    ctypes.CDLL(str(directory / NAME), ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = str(directory)


def stub_driver() -> Any:
    """Triton's own launchers over a device that is not there."""
    from triton.backends.nvidia.driver import CudaLauncher

    from tests.kernels.triton.ahead_of_time import AbsentGPU, LoadingUtilities

    class StubDriver(AbsentGPU):
        launcher_cls = CudaLauncher
        utils = LoadingUtilities()

    return StubDriver(90)


class TritonsLaunches:
    """A recorder that launches as `kernel[grid](...)` does."""

    def launch(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        kernel[grid](*args, **constants)


class Noted:
    """A recorder that keeps what is launched."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[int, ...], Sequence[Any], Mapping[str, Any]]] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        self.launches.append((kernel, grid, args, constants))


def microseconds(work: Callable[[], object], rounds: int) -> float:
    """Of the processor, for each call, in the fastest of five runs of `rounds`."""
    for _ in range(50):
        work()
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        for _ in range(rounds):
            work()
        best = min(best, (time.thread_time() - start) / rounds)
    return best * 1e6


def cases() -> dict[str, Callable[[], object]]:
    """A decode layer's kernels; `attend` is three of them with what the back end does around."""

    from quire.kernels.triton.activation import activation
    from quire.kernels.triton.norm import norm
    from tests.kernels.triton.ahead_of_time import QWEN3_8B, attention_call, empty

    x, weight, gates = empty(8, 4096), empty(4096), empty(8, 24576)
    return {
        "norm": lambda: norm(x, weight, None, 1e-6, centred=False),
        "activation": lambda: activation(gates, "silu", gated=True),
        "attend (decode)": attention_call(QWEN3_8B, 90, 1),
        "attend (mixed)": attention_call(QWEN3_8B, 90, 512),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000, help="calls in each of five runs (default %(default)s)")
    rounds = parser.parse_args().rounds
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as directory:
        build_stub(Path(directory))
        from triton.runtime.driver import driver

        from quire.kernels.triton.runtime import bind, recorded_launches

        driver.set_active(stub_driver())
        print(f"{'':<24}{'Triton':>10}{'Quire':>10}   us")
        for name, call in cases().items():
            noted = Noted()
            with recorded_launches(noted):
                call()
            with recorded_launches(TritonsLaunches()):
                theirs = microseconds(call, rounds)
            print(f"{name:<24}{theirs:>10.1f}{microseconds(call, rounds):>10.1f}")
            for kernel, grid, args, constants in noted.launches:
                given = dict(zip(kernel.arg_names, args, strict=False))
                fixed = {name: value for name, value in given.items() if name in BOUND_PER_LAYER}
                left = [value for name, value in given.items() if name not in BOUND_PER_LAYER]
                theirs = microseconds(partial(kernel[grid], *args, **constants), rounds)
                ours = microseconds(partial(bind(kernel, fixed, **constants), grid, *left), rounds)
                print(f"  {kernel.__name__:<22}{theirs:>10.1f}{ours:>10.1f}")


if __name__ == "__main__":
    main()
