"""Numbers that several processes count, each in its slot of a mapped file, and can sum at any time."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SLOT_BYTES = 4 * 2**20
"""Address space of a slot. Unwritten pages take no memory."""
_NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Cells:
    """Same numbers (float64, initially 0) in every slot. Only a slot's process writes `own`; any may write
    `common`, under `Numbers.lock` where it matters."""

    own: memoryview[float]
    common: memoryview[float]
    slots: tuple[memoryview[float], ...]
    """Cells of each slot; `common` is the last."""

    def total(self, place: int) -> float:
        return sum(slot[place] for slot in self.slots)

    def totals(self) -> Sequence[float]:
        if len(self.slots) == 1:
            return self.own.tolist()
        return [sum(column) for column in zip(*(slot.tolist() for slot in self.slots), strict=True)]


class Numbers:
    """Allocator of Cells, which processes count together. All processes of a file must allocate equal counts in equal
    order."""

    def __init__(self, memory: mmap.mmap, num_slots: int, slot: int, file: int | None = None) -> None:
        """file: descriptor for the lock; None for memory of one process."""
        self._memory = memory
        self._num_slots, self._slot, self._file = num_slots, slot, file
        self._num_used_bytes = 0

    @classmethod
    def alone(cls) -> Numbers:
        return cls(mmap.mmap(-1, SLOT_BYTES), 1, 0)

    @classmethod
    def create(cls, path: Path, num_slots: int) -> Numbers:
        """Make the file and map it with the last, common slot."""
        with path.open("xb") as file:
            file.truncate(num_slots * SLOT_BYTES)
        return cls.open(path, num_slots, num_slots - 1)

    @classmethod
    def open(cls, path: Path, num_slots: int, slot: int) -> Numbers:
        """Map another process's file, to write `slot`."""
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return cls(mmap.mmap(file, num_slots * SLOT_BYTES), num_slots, slot, file)

    def allocate(self, count: int) -> Cells:
        """Next `count` numbers of each slot."""
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
        """Exclude other processes (not threads) from changes of `common`. The system releases the lock of a dead
        process."""
        if self._file is None:
            yield
            return
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
