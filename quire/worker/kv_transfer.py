"""Swapping on the worker: whole blocks between the device's pool and the host's, beside the forward pass.

On a CPU both pools are memory of this process, and the copies run on a thread of their own. On a device they are
enqueued on a stream of their own (quire/worker/platform/stream_transfers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    from quire.kernels.cpu.runtime import NativeRuntime

Pairs: TypeAlias = Sequence[tuple[int, int]]
"""(source, destination) blocks; destinations are distinct."""
BlockMover: TypeAlias = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Pairs], None]
"""(source pages, destination pages, pairs): copies block by block, in every page tensor."""


class BlockTransfers(Protocol):
    """Copies blocks between the pools, for one plan at a time, in the order that `quire.step` documents."""

    def start(self, swap_out: Pairs, swap_in: Pairs) -> None:
        """Start copying. swap_out: (device block, host block). swap_in: (host block, device block), after all of
        swap_out."""
        ...

    def is_reading(self, blocks: Iterable[int]) -> bool:
        """Whether one of these device blocks is still to be saved; the caller must not write it before `wait`."""
        ...

    def wait(self) -> None:
        """Order every copy that was started before whatever the caller computes next. Raises the error of a copy."""
        ...

    def synchronize(self) -> None:
        """Return when every copy that was started has ended, so that the host may read and write its pool."""
        ...


class NoTransfers:
    """The BlockTransfers of an engine without a host pool."""

    def start(self, swap_out: Pairs, swap_in: Pairs) -> None:
        assert not swap_out, "a plan swaps, and there is no host pool"
        assert not swap_in, "a plan swaps, and there is no host pool"

    def is_reading(self, blocks: Iterable[int]) -> bool:
        return False

    def wait(self) -> None:
        """Nothing is ever started."""

    def synchronize(self) -> None:
        """Nothing is ever started."""


class ThreadTransfers:
    """BlockTransfers in the memory of this process, on one thread, which ends with this object."""

    def __init__(self, device: Sequence[torch.Tensor], host: Sequence[torch.Tensor], move: BlockMover) -> None:
        """device[j], host[j]: [num_blocks, page bytes] uint8, of both pools."""
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


def block_mover(runtime: NativeRuntime | None) -> BlockMover:
    """The copy function. runtime: the native kernels to copy with; None: plain torch."""
    if runtime is None:
        return move_blocks
    from quire.kernels.cpu import paged_attention

    return paged_attention.move_blocks


def move_blocks(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], pairs: Pairs) -> None:
    """The plain BlockMover. Raises IndexError for a block that does not exist."""
    with torch.inference_mode():
        read, written = torch.tensor(pairs, dtype=torch.int64).unbind(dim=1)
        for source, destination in zip(sources, destinations, strict=True):
            destination.index_copy_(0, written, source.index_select(0, read))
