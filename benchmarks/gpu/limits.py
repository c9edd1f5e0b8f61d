"""What the card can do at most, measured in the same run, and what a piece of work cannot do without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.timing import Timing, measure


@dataclass(frozen=True, slots=True)
class Work:
    """bytes: read and written in the device's memory, each once. operations: multiplications and additions."""

    bytes: float
    operations: float = 0.0


@dataclass(frozen=True, slots=True)
class Ceilings:
    """bandwidth: bytes a second, read and written, of a pass over the device's memory. peak: operations a second of a
    large product in bfloat16."""

    bandwidth: float
    peak: float

    def seconds(self, work: Work) -> float:
        """The least time that the work can take: of its two floors the higher."""
        return max(work.bytes / self.bandwidth, work.operations / self.peak)

    def bound(self, work: Work) -> str:
        """What it is bound by: "memory" or "arithmetic"."""
        return "memory" if work.bytes / self.bandwidth >= work.operations / self.peak else "arithmetic"

    def share(self, work: Work, seconds: float) -> float:
        """How much of its limit the work reached: 1 is all of it."""
        return self.seconds(work) / seconds


COPIED_BYTES = 2 << 30
PRODUCT_SIZE = 8192


def copy_calls(device: torch.device, num_bytes: int) -> Sequence[Callable[[], object]]:
    """One pass that reads and writes `num_bytes` bytes of random content, made by a kernel: in a CUDA graph a copy is
    a node of another kind, which reached 2.7 of an H200's 4.3 TB/s."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device).view(torch.int32)
    target = torch.empty_like(source)
    return [lambda: torch.bitwise_not(source, out=target)]


def product_calls(device: torch.device, size: int) -> Sequence[Callable[[], object]]:
    """One product of square matrices: on zeros a card runs faster than on numbers, so these are random."""
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return [lambda: torch.mm(left, right, out=out)]


def measure_ceilings(
    device: torch.device, *, num_bytes: int = COPIED_BYTES, size: int = PRODUCT_SIZE
) -> tuple[Ceilings, dict[str, Timing]]:
    """Both limits, and how far apart their samples were."""
    copied = measure(copy_calls(device, num_bytes), device)
    product = measure(product_calls(device, size), device)
    ceilings = Ceilings(2 * num_bytes / copied.median, 2 * size**3 / product.median)
    return ceilings, {"copy": copied, "product": product}
