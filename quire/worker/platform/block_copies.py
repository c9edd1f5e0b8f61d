"""Copy-on-write on a device: a plan's block copies, cut into launches that may copy their blocks in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Pairs = Sequence[tuple[int, int]]


def copy_rounds(copies: Pairs) -> Iterator[Pairs]:
    """Cut (source, destination) pairs into rounds in which no block is both, so that a round may run in any order, and
    so that one round after the other reads every source as it was before all of them.

    As a rule there is one round. A block that is freed and allocated again in the same plan is the source of one pair
    and the destination of another, which then goes into a later round. Pairs form no cycles, because a destination was
    free when the scheduler chose it.
    """
    remaining = copies
    while remaining:
        sources = {source for source, _ in remaining}
        ready = [pair for pair in remaining if pair[1] not in sources]
        assert ready, "block copies form a cycle"
        yield ready
        remaining = [pair for pair in remaining if pair[1] in sources]
