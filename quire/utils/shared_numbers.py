"""Numbers that several processes count, each in its own slot of one file that all of them map, and add up at any time.

Nothing is sent and no process waits for another one, so a sum is told even while a process is stopped. A slot outlives
its process: the next one that opens it counts on.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SLOT_BYTES = 4 * 2**20
"""Address space of a slot. Pages that are never written take no memory."""
_NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Cells:
    """The same numbers (float64, at first 0) of every process. Only the process of a slot writes `own`; `common` is
    written by any, where it matters under `Numbers.lock`."""

    own: memoryview[float]
    common: memoryview[float]
    slots: tuple[memoryview[float], ...]
    """By slot; `common` is the last one."""

    def total(self, place: int) -> float:
        """One number, summed over all slots."""
        return sum(slot[place] for slot in self.slots)

    def totals(self) -> Sequence[float]:
        """Each number, summed over all slots."""
        if len(self.slots) == 1:
            return self.own.tolist()
        return [sum(column) for column in zip(*(slot.tolist() for slot in self.slots), strict=True)]


class Numbers:
    """Hands out cells. All processes of a file ask for the same numbers of cells in the same order."""

    def __init__(self, memory: mmap.mmap, num_slots: int, slot: int, file: int | None = None) -> None:
        """file: its descriptor, for the lock; None for memory of one process."""
        self._memory = memory
        self._num_slots, self._slot, self._file = num_slots, slot, file
        self._num_used_bytes = 0

    @classmethod
    def alone(cls) -> Numbers:
        """Of one process, with one slot."""
        return cls(mmap.mmap(-1, SLOT_BYTES), 1, 0)

    @classmethod
    def create(cls, path: Path, num_slots: int) -> Numbers:
        """Make the file. The maker writes the last, common slot."""
        with path.open("xb") as file:
            file.truncate(num_slots * SLOT_BYTES)
        return cls.open(path, num_slots, num_slots - 1)

    @classmethod
    def open(cls, path: Path, num_slots: int, slot: int) -> Numbers:
        """Map a file that another process has made, to write `slot`."""
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return cls(mmap.mmap(file, num_slots * SLOT_BYTES), num_slots, slot, file)

    def allocate(self, count: int) -> Cells:
        """The next `count` numbers of each slot."""
        begin, end = self._num_used_bytes, self._num_used_bytes + count * _NUMBER_BYTES
        if end > SLOT_BYTES:
            raise ValueError(f"{count} numbers do not fit into a slot: {SLOT_BYTES - begin} bytes are left")
        self._num_used_bytes = end
        whole = memoryview(self._memory)
        offsets = range(0, self._num_slots * SLOT_BYTES, SLOT_BYTES)
        slots = tuple(whole[offset + begin : offset + end].cast("d") for offset in offsets)
        return Cells(slots[self._slot], slots[-1], slots)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes, not other threads, out of what changes `common`. The system releases the lock of a
        process that ends."""
        if self._file is None:
            yield
            return
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
