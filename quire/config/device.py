"""The device slice."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

NATIVE_HEAD_MULTIPLE, NATIVE_HEAD_LIMIT = 8, 256
"""Head sizes that the native kernels compute: multiples of the first up to the second."""


@dataclass(frozen=True)
class DeviceConfig:
    """device: "cpu" (others come with their back ends). num_threads: compute threads of the CPU back end.
    attention_backend: resolved: "native" (the whole model runs on the native kernels) or "torch" (plain operators).
    cpu_isa: instruction set that the native kernels are held to, "auto" for the best one.
    """

    device: str
    num_threads: int
    attention_backend: str
    cpu_isa: str = "auto"


def has_native_kernels() -> bool:
    """Whether the extension with the native CPU kernels was built into this installation."""
    return importlib.util.find_spec("quire.kernels.cpu._native") is not None
