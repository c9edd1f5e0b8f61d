"""Swapping on a device: between its pool and pinned host memory, on a separate stream. Blocks are gathered in a staging
buffer and copied with host neighbours, and likewise back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from quire.kernels.triton.block_copy import PageTable, copy_pages
from quire.worker.kv_transfer import Pairs
from quire.worker.platform.streams import DeviceStreams, StreamEvent

STAGING_BYTES = 64 * 2**20
"""Bytes of the staging buffer, unless a block is larger."""


class StreamTransfers:
    """BlockTransfers on the transfer stream, in order, each after what was computed when it was ordered. `wait` makes
    the compute stream wait, not the host."""

    def __init__(
        self,
        streams: DeviceStreams,
        pages: Sequence[torch.Tensor],
        host: torch.Tensor,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """pages[j]: [num_blocks, page bytes] uint8 on the device. host: [num_host_blocks, num_pages, page bytes] uint8,
        pinned. Use it in the compute stream's context."""
        self._streams = streams
        self._host = host
        self._pool = PageTable.of_pages(pages)
        self._staged_blocks = max(1, min(len(host), staging_bytes // host[0].nbytes))
        self._staging = torch.empty((self._staged_blocks, *host.shape[1:]), dtype=torch.uint8, device=streams.device)
        self._staging_table = PageTable.of_buffer(self._staging)
        self._done: StreamEvent | None = None
        self._reading: frozenset[int] = frozenset()
        self._limits = len(pages[0]), len(host)

    def start(self, swap_out: Pairs, swap_in: Pairs) -> None:
        if not swap_out and not swap_in:
            return
        self._check(swap_out, swap_in)
        self.wait()
        self._reading = frozenset(block for block, _ in swap_out)
        computed = self._streams.record()
        with self._streams.transferring():
            computed.wait()
            for chunk in self._chunks(swap_out):
                blocks, host_blocks = self._columns(chunk)
                copy_pages(self._pool, self._staging_table, self._pairs(blocks, np.arange(len(chunk))))
                for staged, on_host, count in runs(host_blocks):
                    self._host[on_host : on_host + count].copy_(
                        self._staging[staged : staged + count], non_blocking=True
                    )
            for chunk in self._chunks(swap_in):
                host_blocks, blocks = self._columns(chunk)
                for staged, on_host, count in runs(host_blocks):
                    self._staging[staged : staged + count].copy_(
                        self._host[on_host : on_host + count], non_blocking=True
                    )
                copy_pages(self._staging_table, self._pool, self._pairs(np.arange(len(chunk)), blocks))
            self._done = self._streams.record()

    def is_reading(self, blocks: Iterable[int]) -> bool:
        return bool(self._reading) and not self._reading.isdisjoint(blocks)

    def wait(self) -> None:
        if self._done is not None:
            self._done.wait()
            self._reading = frozenset()

    def synchronize(self) -> None:
        if self._done is not None:
            with self._streams.computing():
                self.wait()
            self._done.synchronize()

    def _check(self, swap_out: Pairs, swap_in: Pairs) -> None:
        """Raise IndexError for an invalid block, which a device would access silently."""
        num_blocks, num_host_blocks = self._limits
        pairs = [*swap_out, *((block, host_block) for host_block, block in swap_in)]
        for block, host_block in pairs:
            if not (0 <= block < num_blocks and 0 <= host_block < num_host_blocks):
                raise IndexError(f"block {block} or host block {host_block} does not exist")

    def _chunks(self, pairs: Pairs) -> Iterator[Pairs]:
        for start in range(0, len(pairs), self._staged_blocks):
            yield pairs[start : start + self._staged_blocks]

    def _columns(self, pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
        sources, destinations = np.array(pairs, np.int64).T
        return sources, destinations

    def _pairs(self, sources: np.ndarray, destinations: np.ndarray) -> torch.Tensor:
        host = self._streams.pinned((len(sources), 2), torch.int32)
        host.numpy()[:] = np.stack((sources, destinations), axis=1)
        return host.to(self._streams.device, non_blocking=True)


def runs(blocks: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive numbers in `blocks`: index, first number, length."""
    starts = np.flatnonzero(np.diff(blocks, prepend=blocks[0] - 2) != 1)
    for start, end in zip(starts, [*starts[1:], len(blocks)], strict=True):
        yield int(start), int(blocks[start]), int(end - start)
