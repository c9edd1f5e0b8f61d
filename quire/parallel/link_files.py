"""Links between the stages of a pipeline that are processes of one host.

A link is memory that two processes have mapped, of as many slots as steps may be under way between them, and two
counters of the kernel (eventfd): full and free slots. A process that waits for a slot sleeps. Whatever ends a process,
the executor ends its peers, which would wait for ever.
"""

from __future__ import annotations

import os
from typing import NamedTuple

NUM_SLOTS = 2
"""Steps whose activations a link holds: one is read while the next one is written."""


class LinkFiles(NamedTuple):
    """Descriptors of one link, which both of its ends inherit. memory: NUM_SLOTS slots. full, free: counters of
    slots."""

    memory: int
    full: int
    free: int

    @classmethod
    def create(cls, slot_bytes: int) -> LinkFiles:
        """A new link. The memory belongs to no file system: nothing is left of it when its ends are closed."""
        memory = os.memfd_create("quire-stages")
        os.truncate(memory, NUM_SLOTS * slot_bytes)
        full, free = (os.eventfd(count, os.EFD_SEMAPHORE) for count in (0, NUM_SLOTS))
        return cls(memory, full, free)

    def close(self) -> None:
        for descriptor in self:
            os.close(descriptor)
