"""Memory for weights and activations: page-aligned, zero, in huge pages where the system has them.

Weights are read from end to end in every step: with small pages, each 4 KiB would need a new address translation.
"""

from __future__ import annotations

import mmap

import torch

from quire.errors import InsufficientMemoryError
from quire.utils.sizes import format_bytes

HUGE_PAGE = 2 << 20
ALIGNMENT = 64
"""Bytes of a cache line and of the widest vector."""


def allocate(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8, zero. Reserved, not touched. Raises InsufficientMemoryError when the system refuses."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        # Private: the default, shared memory, gets no huge pages on most systems.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise InsufficientMemoryError(f"the system refuses {format_bytes(num_bytes)}: {error}") from None
    if num_bytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Arena:
    """Memory for many tensors, next to each other in large mappings. In a mapping of its own, what is smaller than a
    huge page, and the end of anything larger, would lie in small pages. A mapping lives as long as any of its tensors.
    """

    def __init__(self, chunk_bytes: int = 64 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk = allocate(0)
        self._used = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8, zero, at a multiple of ALIGNMENT. Raises InsufficientMemoryError like `allocate`."""
        if num_bytes >= self._chunk_bytes:
            return allocate(num_bytes)
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = allocate(self._chunk_bytes), 0
        start = self._used
        self._used = -(-(start + num_bytes) // ALIGNMENT) * ALIGNMENT
        return self._chunk[start : start + num_bytes]
