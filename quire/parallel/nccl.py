"""Collectives between devices over NCCL, which CUDA graphs can capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed

from quire.kernels.triton.norm import sum_parts
from quire.parallel.torch_dist import COLLECTIVE_TIMEOUT, NetworkMeeting


class NcclGroup:
    """Implements ProcessGroup for tensors of the current CUDA device; every rank has its own. Collectives are enqueued
    on the current stream; the host does not wait."""

    native = None

    def __init__(self, meeting_point: Path | NetworkMeeting, rank: int, size: int) -> None:
        """See GlooGroup. Connects at once, because a capture cannot."""
        self.rank = rank
        self.size = size
        library: Any = torch.distributed  # its type stubs lack the constructors of groups
        if isinstance(meeting_point, Path):
            store = library.FileStore(str(meeting_point), size)
        else:
            store = meeting_point.store
        options = library.ProcessGroupNCCL.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        self._group: Any = library.ProcessGroupNCCL(store, rank, size, options)
        self.barrier()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather the parts and add them in rank order, so bits do not depend on the batch."""
        return sum_parts(self._gather(tensor))

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._gather(tensor).unbind(), dim=dim)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        sent = tensor.clone(memory_format=torch.contiguous_format)
        options = torch.distributed.BroadcastOptions()
        options.rootRank = source
        self._group.broadcast([sent], options).wait()
        return sent

    def barrier(self) -> None:
        """See ProcessGroup. The host waits; not in captures."""
        self._gather(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())))
        torch.cuda.current_stream().synchronize()

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = tensor.new_empty(self.size, *tensor.shape)
        self._group._allgather_base(parts, tensor.contiguous()).wait()
        return parts
