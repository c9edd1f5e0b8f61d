"""Device's memory: sizes, peaks, the pools' pages, and errors with needed and free bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from quire.errors import InsufficientMemoryError
from quire.kernels.cpu.memory import allocate
from quire.kv_cache.layout import KVCacheLayout
from quire.utils.sizes import format_bytes
from quire.worker.kv_tensors import allocate_pages
from quire.worker.platform.host_memory import available_memory


class DeviceMemory(Protocol):
    """Measures a device's memory and pins host memory; all sizes are in bytes."""

    @property
    def is_measured(self) -> bool:
        """True if `measure_peak` is supported."""
        ...

    def total(self) -> int: ...

    def free(self) -> int:
        """Free bytes, torch's reserve included."""
        ...

    def measure_peak(self, work: Callable[[], object]) -> int:
        """Run `work` and return the peak of additionally reserved bytes."""
        ...

    def pin(self, memory: torch.Tensor) -> None:
        """Pin host memory, for full-speed copies in parallel with other work. Raises InsufficientMemoryError if the
        system refuses."""
        ...

    def unpin(self, memory: torch.Tensor) -> None:
        """Unpin memory before it is freed; no copy may be in progress."""
        ...


class CudaMemory:
    is_measured = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def measure_peak(self, work: Callable[[], object]) -> int:
        # Measures what torch has reserved, not what it has allocated: fragments too small for the next tensor count.
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_reserved(self._device) - before)

    def pin(self, memory: torch.Tensor) -> None:
        status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(status) != 0:
            # CUDA reports the error again at the next kernel launch: this launch takes it, so that no later one fails.
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)
            raise InsufficientMemoryError(
                f"the system refuses to lock {format_bytes(memory.nbytes)} of host memory (CUDA error {int(status)})"
            )

    def unpin(self, memory: torch.Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class HostMemory:
    """DeviceMemory of Triton's interpreter, where the host is the device: measures nothing."""

    is_measured = False

    def total(self) -> int:
        return available_memory()

    def free(self) -> int:
        return available_memory()

    def measure_peak(self, work: Callable[[], object]) -> int:
        raise AssertionError("the interpreter's memory says nothing about a device's")

    def pin(self, memory: torch.Tensor) -> None:
        """Does nothing."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Does nothing."""


def make_memory(device: torch.device) -> DeviceMemory:
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


def allocate_device_pages(layout: KVCacheLayout, memory: DeviceMemory, device: torch.device) -> list[torch.Tensor]:
    """`layers_per_group` zeroed tensors [num_blocks, page bytes] uint8. Raises InsufficientMemoryError if they do not
    fit."""
    if device.type == "cpu":
        return allocate_pages(layout)
    shape = (layout.num_blocks, layout.block_bytes // layout.layers_per_group)
    with arithmetic(memory, f"the KV cache of {layout.num_blocks} blocks", layout.num_blocks * layout.block_bytes):
        return [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(layout.layers_per_group)]


class PinnedPool:
    """HostPool of a device: contiguous, pinned blocks. blocks: [num_host_blocks + 1, num_pages, page bytes] uint8.
    pages[j]: views [num_host_blocks + 1, page bytes]."""

    def __init__(self, layout: KVCacheLayout, memory: DeviceMemory) -> None:
        """Allocate the pool on the host. Raises InsufficientMemoryError."""
        num_blocks = layout.num_host_blocks + 1
        flat = allocate(num_blocks * layout.block_bytes)
        self.blocks = flat.view(num_blocks, layout.layers_per_group, -1)
        self._memory = memory
        try:
            memory.pin(self.blocks)
        except InsufficientMemoryError as error:
            raise InsufficientMemoryError(f"{error} for swapped blocks; set swap_space to less") from None

    @property
    def pages(self) -> Sequence[torch.Tensor]:
        return self.blocks.unbind(1)

    def close(self) -> None:
        self._memory.unpin(self.blocks)


@contextmanager
def arithmetic(memory: DeviceMemory, purpose: str, num_bytes: int | None = None) -> Iterator[None]:
    """Turn torch.OutOfMemoryError into InsufficientMemoryError with purpose, needed and free bytes. num_bytes: needed
    (None: unknown)."""
    free = memory.free()
    try:
        yield
    except torch.OutOfMemoryError:
        needed = "" if num_bytes is None else f"{format_bytes(num_bytes)} are needed, and "
        raise InsufficientMemoryError(
            f"no memory on the device for {purpose}: {needed}of its {format_bytes(memory.total())} "
            f"{format_bytes(free)} were free"
        ) from None
