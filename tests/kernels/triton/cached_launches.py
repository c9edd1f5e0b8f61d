"""Launches kernels as an engine does on a card of a compute capability (9.0), and prints for each kernel that Triton
looks up, and for each module in C that launches one, whether the cache held it, as a line of JSON.

    python -m tests.kernels.triton.cached_launches [80]

Only the questions that Triton's driver would ask libcuda are answered here. Run without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher
from triton.runtime import build
from triton.runtime.driver import driver

from quire import envs
from tests.kernels.triton.ahead_of_time import LoadingUtilities, NotingLauncher, word_calls


class FindingLauncher(NotingLauncher):
    """Also looks for the module that a card would launch with."""

    def __init__(self, source: Any, metadata: Any) -> None:
        super().__init__(source, metadata)
        CudaLauncher(source, metadata)


class CardOfNinety(CudaDriver):
    """A CudaDriver without libcuda."""

    def __init__(self, capability: int = 90) -> None:
        self._capability = divmod(capability, 10)
        self.utils, self.launcher_cls = LoadingUtilities(), FindingLauncher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return self._capability


def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
    print(json.dumps({"kernel": src.name, "was cached": cache_hit}), flush=True)


def note_module(name: str, path: str) -> SimpleNamespace:
    """Stands for loading one, which needs libcuda. path: empty where it was not found."""
    print(json.dumps({"kernel": name, "was cached": bool(path)}), flush=True)
    return SimpleNamespace(launch=None)


def not_built(*_: Any) -> str:
    return os.devnull


def main() -> None:
    envs.keep_triton_cache()  # as the worker of a device does
    driver.set_active(CardOfNinety(*map(int, sys.argv[1:])))
    knobs.compilation.listener = note
    knobs.nvidia.libcuda_path = os.devnull
    build._build = not_built
    build._load_module_from_path = lambda name, path: note_module(name, path if Path(path).stat().st_size else "")
    nvidia.compile_module_from_src(
        (Path(nvidia.dirname) / "driver.c").read_text(), "cuda_utils", include_dirs=nvidia.include_dirs
    )
    for call in word_calls():
        call()


if __name__ == "__main__":
    main()
