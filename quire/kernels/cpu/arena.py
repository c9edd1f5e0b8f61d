"""Memory for a model's weights."""

from __future__ import annotations

import torch

from quire.envs import affinity_cores
from quire.kernels.cpu import _native
from quire.kernels.cpu.memory import ALIGNMENT, HUGE_PAGE, allocate

_MOST_TOUCHED = 32 << 20
_MOST_THREADS = 8


class Arena:
    """Memory for many tensors, next to each other in large mappings. In a mapping of its own, what is smaller than a
    huge page, and the end of anything larger, would lie in small pages. A mapping lives as long as any of its tensors.

    What is handed out is about to be filled. Threads of all cores have the system give its memory first, with some of
    what will be asked for next: a single thread that fills weights waits longer for memory than it works.
    """

    def __init__(self, chunk_bytes: int = 64 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk = allocate(0)
        self._used = self._touched = self._total = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8, zero, at a multiple of ALIGNMENT. Raises InsufficientMemoryError like `allocate`."""
        if num_bytes >= self._chunk_bytes:
            return _touched(allocate(num_bytes))
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used, self._touched = allocate(self._chunk_bytes), 0, 0
        start, end = self._used, self._used + num_bytes
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        self._total += num_bytes
        if end > self._touched:
            first, self._touched = self._touched, end + min(self._total // 8, _MOST_TOUCHED)
            _touched(self._chunk[first : self._touched])
        return self._chunk[start:end]


def _touched(memory: torch.Tensor) -> torch.Tensor:
    """The same, which the system has given."""
    begin = memory.data_ptr()
    _native.touch(begin, begin + len(memory), min(affinity_cores(), _MOST_THREADS, 1 + len(memory) // HUGE_PAGE))
    return memory
