"""Devices that `quire plan --gpu` knows: data, from the manufacturers' public data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GB = 10**9


@dataclass(frozen=True)
class Device:
    """memory: bytes, with the sheet's decimal GB (what a driver reports may be some percent more).
    bandwidth: bytes per second of the device memory. peak: dense 16-bit matrix operations per second (bf16, or fp16
    where there is no bf16), accumulating in float32, without structured sparsity.
    """

    title: str
    memory: float
    bandwidth: float
    peak: float


def _device(title: str, memory_gb: float, bandwidth_gb_s: float, peak_tflops: float) -> Device:
    return Device(title, memory_gb * GB, bandwidth_gb_s * GB, peak_tflops * 1e12)


DEVICES: Mapping[str, Device] = {
    "a10": _device("NVIDIA A10 24GB", 24, 600, 125),
    "a100-40g": _device("NVIDIA A100 40GB SXM", 40, 1555, 312),
    "a100-80g": _device("NVIDIA A100 80GB SXM", 80, 2039, 312),
    "b200": _device("NVIDIA B200 (HGX)", 180, 7700, 2250),
    "gb200": _device("NVIDIA GB200, one of its two GPUs", 186, 8000, 2500),
    "h100": _device("NVIDIA H100 80GB SXM", 80, 3350, 989),
    "h100-pcie": _device("NVIDIA H100 80GB PCIe", 80, 2000, 756),
    "h200": _device("NVIDIA H200 141GB SXM", 141, 4800, 989),
    "l4": _device("NVIDIA L4 24GB", 24, 300, 121),
    "l40s": _device("NVIDIA L40S 48GB", 48, 864, 362),
    "mi300x": _device("AMD MI300X 192GB", 192, 5300, 1307),
    "rtx-3090": _device("NVIDIA RTX 3090 24GB", 24, 936, 71),
    "rtx-4090": _device("NVIDIA RTX 4090 24GB", 24, 1008, 165),
    "t4": _device("NVIDIA T4 16GB (fp16)", 16, 320, 65),
}
