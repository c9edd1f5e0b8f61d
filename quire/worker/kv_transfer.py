"""Swapping of whole blocks between the device's and the host's pool, beside the forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

Pairs: TypeAlias = Sequence[tuple[int, int]]
"""(source, destination) blocks; destinations are distinct."""


class BlockTransfers(Protocol):
    """Copies blocks between the pools, one plan at a time, in the order that `quire.step` documents."""

    def start(self, swap_out: Pairs, swap_in: Pairs) -> None:
        """Start a plan's copies between pools. swap_out: (device block, host block). swap_in: (host block, device
        block), after all of swap_out."""
        ...

    def is_reading(self, blocks: Iterable[int]) -> bool:
        """True if one of these device blocks is still being saved; do not write it before `wait`."""
        ...

    def wait(self) -> None:
        """Order all started copies before later computation. Raises a copy's error."""
        ...

    def synchronize(self) -> None:
        """Wait on the host for all started copies. May be called anywhere."""
        ...


class NoTransfers:
    """BlockTransfers of a worker without a host pool: refuses every copy."""

    def start(self, swap_out: Pairs, swap_in: Pairs) -> None:
        assert not swap_out, "a plan swaps, and there is no host pool"
        assert not swap_in, "a plan swaps, and there is no host pool"

    def is_reading(self, blocks: Iterable[int]) -> bool:
        return False

    def wait(self) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""
