"""Collectives over memory shared by the ranks of one host, which native programs record as kernels."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from quire import envs
from quire.errors import QuireError
from quire.kernels.cpu import _native
from quire.parallel.torch_dist import COLLECTIVE_TIMEOUT, GlooGroup, NetworkMeeting

SPINS = 2000
"""Polls of another rank's word before a rank sleeps, some tens of microseconds."""
CROWDED_SPINS = 50
"""Same if ranks outnumber cores."""


class SharedMemoryGroup(GlooGroup):
    """Implements ProcessGroup."""

    def __init__(self, meeting_point: Path | NetworkMeeting, rank: int, size: int) -> None:
        """See GlooGroup. Raises QuireError if a rank cannot open the first one's memory."""
        super().__init__(meeting_point, rank, size)
        num_bytes = _native.SharedRanks.num_bytes(size)
        own = -1
        if rank == 0:
            own = os.memfd_create("quire-ranks")  # in no file system: nothing stays, and /dev/shm sets no limit
            os.truncate(own, num_bytes)
        pid, number = self.broadcast(torch.tensor([os.getpid(), own]), source=0).tolist()
        path = f"/proc/{pid}/fd/{number}"
        try:
            descriptor = os.open(path, os.O_RDWR) if rank else own
        except OSError as error:
            raise QuireError(f"rank {rank} cannot reach the memory that ranks share: {path}: {error}") from None
        # The tensor keeps the mapping.
        self._memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        self.barrier()
        os.close(descriptor)
        has_cores = envs.affinity_cores() >= size
        spins, seconds = SPINS if has_cores else CROWDED_SPINS, COLLECTIVE_TIMEOUT.total_seconds()
        self.native = _native.SharedRanks(self._memory.data_ptr(), rank, size, spins, seconds)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32:
            return super().all_reduce(tensor)
        tensor = tensor.contiguous()
        total = torch.empty_like(tensor)
        self.native.all_reduce(tensor.data_ptr(), total.data_ptr(), 1, tensor.numel())
        return total
