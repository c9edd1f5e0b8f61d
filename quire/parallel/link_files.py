"""Links between the stages of a pipeline in processes of one host.

A link is memory mapped by two processes, with a slot for each step under way.
"""

from __future__ import annotations

import os
from typing import NamedTuple

NUM_SLOTS = 2
"""Steps whose activations a link holds: one is read while the next one is written."""


class LinkFiles(NamedTuple):
    """Descriptors of one link, inherited by both ends. memory: NUM_SLOTS slots. full, free: counters of slots."""

    memory: int
    full: int
    free: int

    @classmethod
    def create(cls, slot_bytes: int) -> LinkFiles:
        """New link, before the ranks start. Its memory is in no file system and is gone when both ends are closed."""
        memory = os.memfd_create("quire-stages")
        os.truncate(memory, NUM_SLOTS * slot_bytes)
        full, free = (os.eventfd(count, os.EFD_SEMAPHORE) for count in (0, NUM_SLOTS))
        return cls(memory, full, free)

    def close(self) -> None:
        for descriptor in self:
            os.close(descriptor)
