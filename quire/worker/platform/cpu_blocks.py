from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

import torch

from quire.worker.kv_transfer import Pairs

if TYPE_CHECKING:
    from quire.kernels.cpu.runtime import NativeRuntime

BlockCopier: TypeAlias = Callable[[Pairs], None]
"""Copies block `source` to block `destination` in every page tensor, for each pair. All sources are read before any
destination is written; destinations are distinct."""
BlockMover: TypeAlias = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Pairs], None]
"""(source pages, destination pages, pairs): copies blocks in every page tensor."""


def block_copier(pages: Sequence[torch.Tensor], runtime: NativeRuntime | None) -> BlockCopier:
    """Function that copies blocks inside the pool. pages[j]: [num_blocks, page bytes] uint8. runtime: native kernels;
    None: torch. For copies on write."""
    if runtime is None or not pages:
        return lambda copies: copy_blocks(pages, copies)
    from quire.kernels.cpu import paged_attention

    pool, (num_blocks, page_bytes) = runtime.pool, pages[0].shape
    return lambda copies: paged_attention.copy_blocks(pool, pages, page_bytes, num_blocks, copies)


def copy_blocks(pages: Sequence[torch.Tensor], copies: Pairs) -> None:
    """BlockCopier in torch. pages[j]: [num_blocks, ...]."""
    sources, destinations = torch.tensor(copies, dtype=torch.int64).unbind(dim=1)
    for page in pages:
        page.index_copy_(0, destinations, page.index_select(0, sources))


def block_mover(runtime: NativeRuntime | None) -> BlockMover:
    """Function that copies blocks between device and host pools' pages, for swaps. runtime: native kernels; None:
    torch."""
    if runtime is None:
        return move_blocks
    from quire.kernels.cpu import paged_attention

    return paged_attention.move_blocks


def move_blocks(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], pairs: Pairs) -> None:
    """BlockMover in torch. Raises IndexError for an invalid block. pairs: (source, destination)."""
    with torch.inference_mode():
        read, written = torch.tensor(pairs, dtype=torch.int64).unbind(dim=1)
        for source, destination in zip(sources, destinations, strict=True):
            destination.index_copy_(0, written, source.index_select(0, read))


class HostPages:
    """Host pool of a CPU worker (HostBlockTensors): ordinary memory."""

    def __init__(self, pages: Sequence[torch.Tensor]) -> None:
        self.pages = pages

    def close(self) -> None:
        """Does nothing."""


class ThreadTransfers:
    """BlockTransfers on one thread, which ends with this object."""

    def __init__(self, device: Sequence[torch.Tensor], host: Sequence[torch.Tensor], move: BlockMover) -> None:
        """device[j], host[j]: [num_blocks, page bytes] uint8."""
        self._device = device
        self._host = host
        self._move = move
        self._thread = ThreadPoolExecutor(1, "quire-kv-transfer")
        self._running: Future[None] | None = None
        self._reading: frozenset[int] = frozenset()

    def start(self, swap_out: Pairs, swap_in: Pairs) -> None:
        if not swap_out and not swap_in:
            return
        self.wait()
        self._reading = frozenset(block for block, _ in swap_out)
        self._running = self._thread.submit(self._run, swap_out, swap_in)

    def is_reading(self, blocks: Iterable[int]) -> bool:
        return bool(self._reading) and not self._reading.isdisjoint(blocks)

    def wait(self) -> None:
        if self._running is not None:
            running, self._running, self._reading = self._running, None, frozenset()
            running.result()

    def synchronize(self) -> None:
        self.wait()

    def _run(self, swap_out: Pairs, swap_in: Pairs) -> None:
        if swap_out:
            self._move(self._device, self._host, swap_out)
        if swap_in:
            self._move(self._host, self._device, swap_in)
