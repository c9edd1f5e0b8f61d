"""The memory that the engine core and the mask process share: a board that says what the process works at, and a slot
for the mask of each matcher. And the memory in which a thread makes a mask before."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import tempfile
import time
from typing import NamedTuple

BOARD_BYTES = 4096
MIN_SLOTS = 64
MEASURED_SECONDS = 0.0005
"""Work that takes no longer by the clock on the wall counts as processor time, which a system call would tell."""
_ENTRY = struct.Struct("<qd")
"""On the board, for each thread: slot + 1, or 0 while it has no work; time.monotonic() when it began."""


def num_mask_bytes(vocab_size: int) -> int:
    """Bytes of a mask: a bit for each token of the model, in whole words of four bytes."""
    return 4 * -(-vocab_size // 32)


def num_slot_bytes(vocab_size: int) -> int:
    """Bytes that the library writes at most: a model without end tokens has one behind its vocabulary, which masks
    leave out (`make_vocabulary`)."""
    return 4 * (vocab_size // 32 + 1)


class Busy(NamedTuple):
    """slot: whose work a thread does. since: by time.monotonic()."""

    slot: int
    since: float


def make_memory() -> int:
    """A descriptor of memory without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quire-masks", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class MaskMemory:
    """One process's view of the memory. Both call `hold` before a slot is used."""

    def __init__(self, descriptor: int, vocab_size: int) -> None:
        self._descriptor = descriptor
        self._stride = -(-num_slot_bytes(vocab_size) // 64) * 64
        self.num_slots = 0
        self._map: mmap.mmap
        self.hold(MIN_SLOTS)

    def hold(self, num_slots: int) -> None:
        """Have room for `num_slots` slots. A slot takes memory once it is written to."""
        if num_slots <= self.num_slots:
            return
        size = BOARD_BYTES + num_slots * self._stride
        if os.fstat(self._descriptor).st_size < size:
            os.ftruncate(self._descriptor, size)
        self._map = mmap.mmap(self._descriptor, size)
        self.num_slots = num_slots

    def write(self, slot: int, mask: memoryview) -> None:
        start = BOARD_BYTES + slot * self._stride
        self._map[start : start + len(mask)] = mask

    def read(self, slot: int, num_bytes: int) -> bytes:
        start = BOARD_BYTES + slot * self._stride
        return self._map[start : start + num_bytes]

    def note_work(self, thread: int, slot: int, now: float) -> None:
        """A thread of the mask process begins work for a slot; -1: it has none."""
        _ENTRY.pack_into(self._map, thread * _ENTRY.size, slot + 1, now)

    def busy(self, num_threads: int) -> list[Busy]:
        """The work of each thread of the mask process that has some, or had some when the process ended."""
        entries = (_ENTRY.unpack_from(self._map, thread * _ENTRY.size) for thread in range(num_threads))
        return [Busy(number - 1, since) for number, since in entries if number]

    def forget(self) -> None:
        """Give back the memory of all masks: none is used."""
        if hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE, BOARD_BYTES)

    def close(self) -> None:
        """Close the descriptor; the views go with the object."""
        os.close(self._descriptor)


class Scratch:
    """Memory in which a thread makes masks, and the clock of its work. A sequence may end while its mask is made, and
    its slot become another one's."""

    def __init__(self, num_bytes: int) -> None:
        buffer = ctypes.create_string_buffer(num_bytes)
        self.address = ctypes.addressof(buffer)
        self.view = memoryview(buffer).cast("B")
        self._began = self._since = 0.0
        """By time.monotonic(): beginning of the piece of work; seconds of brief pieces since `_processor` was read."""
        self._processor = 0.0

    def begin(self) -> None:
        """A piece of work begins. Called by the thread that does it."""
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Processor time since the last call, or `begin`; never less where that is brief."""
        now = time.monotonic()
        found, self._began = now - self._began, now
        if found < MEASURED_SECONDS:
            self._since += found
            return found
        processor = time.thread_time()
        found = min(found, max(0.0, processor - self._processor - self._since))
        self._processor, self._since = processor, 0.0
        return found
