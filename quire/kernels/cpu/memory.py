"""Page-aligned zeroed memory for weights and activations, in huge pages where available."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from quire.errors import InsufficientMemoryError
from quire.utils.sizes import format_bytes

HUGE_PAGE = 2 << 20
ALIGNMENT = 64
"""Bytes of a cache line and of the widest vector."""
_TOUCHED_AT_ONCE = 2 * HUGE_PAGE


def allocate(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8, zero, reserved but untouched. Raises InsufficientMemoryError if the system refuses."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(reserve(num_bytes), dtype=torch.uint8)


def reserve(num_bytes: int) -> mmap.mmap:
    """Mapping behind `allocate`'s tensor; it lives as long as any tensor over it."""
    try:
        # Private: the default, shared memory, gets no huge pages on most systems.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise InsufficientMemoryError(f"the system refuses {format_bytes(num_bytes)}: {error}") from None
    if num_bytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def give_back(memory: mmap.mmap, first: int, last: int) -> None:
    """Return a mapping's whole huge pages of zeros between two bytes to the system; they stay zeros."""
    first, last = -(-first // HUGE_PAGE) * HUGE_PAGE, -(-last // mmap.PAGESIZE) * mmap.PAGESIZE
    if first < last and hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def touch(memory: Sequence[torch.Tensor], num_threads: int) -> None:
    """Touch every page of zeroed tensors, with threads, so first use is fast."""
    pieces = [piece for each in memory for piece in each.view(-1).split(_TOUCHED_AT_ONCE)]
    if num_threads == 1 or len(pieces) < 2:
        for piece in pieces:
            _write(piece)
        return
    with ThreadPoolExecutor(min(num_threads, len(pieces))) as threads:  # torch releases the interpreter while it writes
        for _ in threads.map(_write, pieces):
            pass


@torch.inference_mode()
def _write(piece: torch.Tensor) -> None:
    piece[:: mmap.PAGESIZE].zero_()
