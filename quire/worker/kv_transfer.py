"""Swapping on the worker: whole blocks between the device's pool and the host's, beside the forward pass.

On a CPU both pools are memory of this process, and the copies run on a thread of their own
(quire/worker/platform/cpu_blocks.py). On a device they are enqueued on a stream of their own
(quire/worker/platform/stream_transfers.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

Pairs: TypeAlias = Sequence[tuple[int, int]]
"""(source, destination) blocks; destinations are distinct."""


class BlockTransfers(Protocol):
    """Copies blocks between the pools, for one plan at a time, in the order that `quire.step` documents."""

    def start(self, swap_out: Pairs, swap_in: Pairs) -> None:
        """Start copying. swap_out: (device block, host block). swap_in: (host block, device block), after all of
        swap_out."""
        ...

    def is_reading(self, blocks: Iterable[int]) -> bool:
        """True where one of these device blocks is still to be saved; the caller must not write it before `wait`."""
        ...

    def wait(self) -> None:
        """Order every copy that was started before whatever the caller computes next. Raises the error of a copy."""
        ...

    def synchronize(self) -> None:
        """Return when every copy that was started has ended, so that the host may read and write its pool. Called
        anywhere."""
        ...


class NoTransfers:
    """The BlockTransfers of an engine without a host pool."""

    def start(self, swap_out: Pairs, swap_in: Pairs) -> None:
        assert not swap_out, "a plan swaps, and there is no host pool"
        assert not swap_in, "a plan swaps, and there is no host pool"

    def is_reading(self, blocks: Iterable[int]) -> bool:
        return False

    def wait(self) -> None:
        """Return at once: no transfer is ever started."""

    def synchronize(self) -> None:
        """Return at once: no transfer is ever started."""
