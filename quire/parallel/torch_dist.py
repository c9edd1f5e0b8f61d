"""Collectives of torch.distributed over gloo: on the loopback interface for one host, else on a reachable address."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

LOOPBACK = "127.0.0.1"
COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Guard only: the executor ends ranks that wait for an ended one."""


@dataclass(frozen=True)
class NetworkMeeting:
    """Place where ranks of several hosts exchange addresses: a store on the first. address: this rank's, reachable from
    others. Neither store nor collectives authenticate: the network must be private."""

    store: Any
    address: str

    @classmethod
    def open(cls, address: str, port: int = 0) -> NetworkMeeting:
        """Meeting of the first rank. port: 0: any free one."""
        library: Any = torch.distributed
        return cls(library.TCPStore(address, port, is_master=True, wait_for_workers=False), address)

    @classmethod
    def at(cls, host: str, port: int, address: str) -> NetworkMeeting:
        """Meeting of another rank, at the first one's store."""
        library: Any = torch.distributed
        return cls(library.TCPStore(host, port, is_master=False), address)

    @property
    def port(self) -> int:
        port: int = self.store.port
        return port

    def of(self, name: str) -> NetworkMeeting:
        """Meeting of some of the ranks in the same store, under a name of their own."""
        library: Any = torch.distributed
        return NetworkMeeting(library.PrefixStore(name, self.store), self.address)


def gloo(meeting: NetworkMeeting, rank: int, size: int) -> Any:
    """torch's gloo group of these ranks, once all have called it."""
    library: Any = torch.distributed  # its type stubs lack the constructors of groups
    options = library.ProcessGroupGloo._Options()
    options._devices = [library.ProcessGroupGloo.create_device(hostname=meeting.address)]
    options._timeout = COLLECTIVE_TIMEOUT
    return library.ProcessGroupGloo(meeting.store, rank, size, options)


class GlooGroup:
    """Implements ProcessGroup for tensors in host memory."""

    native: Any = None

    def __init__(self, meeting_point: Path | NetworkMeeting, rank: int, size: int) -> None:
        """Return when all ranks have joined. meeting_point: for ranks of one host a file that they create to exchange
        their addresses, in a directory that only this user can enter."""
        self.rank = rank
        self.size = size
        if isinstance(meeting_point, Path):
            library: Any = torch.distributed
            meeting_point = NetworkMeeting(library.FileStore(str(meeting_point), size), LOOPBACK)
        self._group = gloo(meeting_point, rank, size)
        self.barrier()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add all parts in rank order on every rank, so bits do not depend on the batch."""
        parts = self._gather(tensor)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._gather(tensor), dim=dim)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        sent = tensor.clone(memory_format=torch.contiguous_format)
        options = torch.distributed.BroadcastOptions()
        options.rootRank = source
        self._group.broadcast([sent], options).wait()
        return sent

    def barrier(self) -> None:
        self._group.barrier().wait()

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._group.allgather([parts], [tensor]).wait()
        return parts
