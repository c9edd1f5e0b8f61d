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
