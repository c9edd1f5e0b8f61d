"""Copy-on-write on a device: a plan's copies of blocks, in launches whose order nobody can tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Pairs = Sequence[tuple[int, int]]


def copy_rounds(copies: Pairs) -> Iterator[Pairs]:
    """Cut (source, destination) pairs into rounds in which no block is both, so that a round may run in any order, and
    so that one round after the other reads every source as it was before all of them.

    One round as a rule. A block that is read here and handed out again in the same plan makes a chain: who writes it
    comes later. There are no circles: of a copy the destination was free, so nobody can have waited for its content.
    """
    remaining = copies
    while remaining:
        sources = {source for source, _ in remaining}
        ready = [pair for pair in remaining if pair[1] not in sources]
        assert ready, "blocks are copied in a circle"
        yield ready
        remaining = [pair for pair in remaining if pair[1] in sources]
