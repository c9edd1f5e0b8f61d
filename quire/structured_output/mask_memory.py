"""Memory shared by engine core and mask process: a board with the process's current work, and a slot per matcher's
mask."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from typing import NamedTuple

BOARD_BYTES = 4096
MIN_SLOTS = 64
MEASURED_SECONDS = 0.0005
"""Longest work measured by the wall clock."""
SINCE_BITS = 40
"""Low bits of a thread's entry on the board, one word that is read whole: milliseconds of time.monotonic() at the
work's beginning. Above them: slot + 1, or 0 without work."""


def num_mask_bytes(vocab_size: int) -> int:
    """Bytes of a mask: one bit per token of the model, in words of four bytes."""
    return 4 * -(-vocab_size // 32)


def num_slot_bytes(vocab_size: int) -> int:
    """Bytes of a slot: bound of those that the library writes for a mask."""
    return 4 * (vocab_size // 32 + 1)


class Busy(NamedTuple):
    """Thread's current work. slot: its slot. since: its beginning (time.monotonic())."""

    slot: int
    since: float


def make_memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quire-masks", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class MaskMemory:
    """Shared memory of masks, as one process sees it."""

    def __init__(self, descriptor: int, vocab_size: int) -> None:
        self._descriptor = descriptor
        self._stride = -(-num_slot_bytes(vocab_size) // 64) * 64
        self.num_slots = 0
        self._map: mmap.mmap
        self._board: memoryview[int]
        self.hold(MIN_SLOTS)

    def hold(self, num_slots: int) -> None:
        """Grow the memory to `num_slots` slots."""
        if num_slots <= self.num_slots:
            return
        size = BOARD_BYTES + num_slots * self._stride
        if os.fstat(self._descriptor).st_size < size:
            os.ftruncate(self._descriptor, size)
        self._map = mmap.mmap(self._descriptor, size)
        self._board = memoryview(self._map)[:BOARD_BYTES].cast("Q")
        self.num_slots = num_slots

    def write(self, slot: int, mask: memoryview) -> None:
        start = BOARD_BYTES + slot * self._stride
        self._map[start : start + len(mask)] = mask

    def read(self, slot: int, num_bytes: int) -> bytes:
        start = BOARD_BYTES + slot * self._stride
        return self._map[start : start + num_bytes]

    def note_work(self, thread: int, slot: int, now: float) -> None:
        """A thread of the mask process begins work for a slot; -1: it has none."""
        self._board[thread] = (slot + 1) << SINCE_BITS | int(1000 * now)

    def busy(self, num_threads: int) -> list[Busy]:
        """Current work of each thread of the mask process, or its last work before the process ended."""
        entries = (divmod(self._board[thread], 1 << SINCE_BITS) for thread in range(num_threads))
        return [Busy(number - 1, since / 1000) for number, since in entries if number]

    def forget(self) -> None:
        """Release the memory of all masks, while none is used."""
        if hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE, BOARD_BYTES)

    def close(self) -> None:
        os.close(self._descriptor)


class MaskScratch:
    """Thread's memory for masks, and the clock of its work. Not the slot itself, because a sequence may end while its
    mask is made, and its slot be reused."""

    def __init__(self, num_bytes: int) -> None:
        buffer = ctypes.create_string_buffer(num_bytes)
        self.address = ctypes.addressof(buffer)
        self.view = memoryview(buffer).cast("B")
        self._began = self._since = 0.0
        """time.monotonic() at the work's beginning; seconds of brief work since `_processor` was read."""
        self._processor = 0.0

    def begin(self) -> None:
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Processor time since the last call, or `begin`; brief work is measured by the wall clock."""
        now = time.monotonic()
        found, self._began = now - self._began, now
        if found < MEASURED_SECONDS:
            self._since += found
            return found
        processor = time.thread_time()
        found = min(found, max(0.0, processor - self._processor - self._since))
        self._processor, self._since = processor, 0.0
        return found
