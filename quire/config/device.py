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
    matmul_precision: what activations are rounded to before they multiply weights, keys or values that are stored in
    bfloat16: "float32" (they are not), "bfloat16", or "auto": bfloat16 where the CPU multiplies it, which the native
    kernels find out when they start. Plain operators multiply in the model's dtype, which it then is.
    """

    device: str
    num_threads: int
    attention_backend: str
    cpu_isa: str = "auto"
    matmul_precision: str = "float32"


def has_native_kernels() -> bool:
    """Whether the extension with the native CPU kernels was built into this installation."""
    return importlib.util.find_spec("quire.kernels.cpu._native") is not None
