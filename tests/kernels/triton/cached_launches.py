"""Launches kernels as an engine does on a card of compute capability 9.0, and prints for each that Triton had to look
up whether the cache held it, as a line of JSON.

    python -m tests.kernels.triton.cached_launches

Triton's own driver says what the card is; only the questions that it would ask libcuda are answered here. Run without
TRITON_INTERPRET.
"""

from __future__ import annotations

import json
from typing import Any

from triton import knobs
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime.driver import driver

from quire import envs
from tests.kernels.triton.ahead_of_time import LoadingUtilities, NotingLauncher, row_calls


class CardOfNinety(CudaDriver):
    """A CudaDriver without libcuda."""

    def __init__(self) -> None:
        self.utils, self.launcher_cls = LoadingUtilities(), NotingLauncher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return 9, 0


def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
    print(json.dumps({"kernel": src.name, "was cached": cache_hit}), flush=True)


def main() -> None:
    envs.keep_triton_cache()  # as the worker of a device does
    driver.set_active(CardOfNinety())
    knobs.compilation.listener = note
    for call in row_calls():
        call()


if __name__ == "__main__":
    main()
