"""Upload of a step to the device, in one copy: the batch's columns and all changes of rows (words, and copies between
rows)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from quire.kernels.triton.rows import copy_words, write_words
from quire.worker.platform.streams import DeviceStreams, StreamEvent

SECTION_ALIGNMENT = 16
"""Alignment of columns in words (64 bytes)."""
FIRST_CAPACITY = 2**16
"""Initial buffer size in words."""
NUM_DEVICE_BUFFERS = 2
"""Device buffers: one is read while the next step's copy fills the other."""


@dataclass(frozen=True, slots=True)
class Section:
    """Place of one column in the upload: its first int32 word, and its shape."""

    start: int
    shape: tuple[int, ...]


def buffer_capacity(num_words: int) -> int:
    return max(FIRST_CAPACITY, 1 << (num_words - 1).bit_length())


class Upload:
    """Buffers of a step: `add` columns, `send` once, then `view` them on the device until the next `send`. The copy has
    its own stream and overlaps the previous step."""

    def __init__(self, streams: DeviceStreams, num_buffers: int) -> None:
        """num_buffers: host buffers; one more than the steps in progress, or filling waits. Use it in the compute
        stream's context."""
        self._streams = streams
        self._hosts = [streams.pinned((FIRST_CAPACITY,), torch.int32) for _ in range(num_buffers)]
        self._copied: list[StreamEvent | None] = [None] * num_buffers
        self._turn = 0
        self._used = 0
        self._devices = [self._allocate(FIRST_CAPACITY) for _ in range(NUM_DEVICE_BUFFERS)]
        # New memory may be reused memory that enqueued kernels still read; an event recorded now follows them.
        self._free: list[StreamEvent] = [streams.record()] * NUM_DEVICE_BUFFERS
        self._device_turn = 0

    def begin(self) -> None:
        self._turn = (self._turn + 1) % len(self._hosts)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # passed long ago, unless more steps are in progress than `num_buffers` allows
        self._used = 0

    def add(self, values: np.ndarray) -> Section:
        """Put a column into this step's upload; returns its place. values: integers that fit into 32 bits, of any
        shape."""
        start, size = self._used, values.size
        end = start + -(-size // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
        if end > len(self._hosts[self._turn]):
            self._grow(end)
        self._hosts[self._turn].numpy()[start : start + size] = values.reshape(-1)
        self._used = end
        return Section(start, values.shape)

    def send(self) -> None:
        """Enqueue the copy of all added columns to the device; later work on the compute stream can read it."""
        streams, host = self._streams, self._hosts[self._turn]
        previous, self._device_turn = self._device_turn, (self._device_turn + 1) % NUM_DEVICE_BUFFERS
        # All kernels that read the previous step's buffer were enqueued before this call.
        self._free[previous] = streams.record()
        if len(self._devices[self._device_turn]) < self._used:
            self._devices[self._device_turn] = self._allocate(len(host))
            self._free[self._device_turn] = self._free[previous]  # new memory, see __init__
        device = self._devices[self._device_turn]
        with streams.copying_in():
            self._free[self._device_turn].wait()
            device[: self._used].copy_(host[: self._used], non_blocking=True)
            copied = self._copied[self._turn] = streams.record()
        copied.wait()

    def view(self, section: Section) -> torch.Tensor:
        """Sent column as a tensor on the device, int32."""
        size = math.prod(section.shape)
        return self._devices[self._device_turn][section.start : section.start + size].view(section.shape)

    def _allocate(self, num_words: int) -> torch.Tensor:
        return torch.empty(num_words, dtype=torch.int32, device=self._streams.device)

    def _grow(self, num_words: int) -> None:
        larger = self._streams.pinned((buffer_capacity(num_words),), torch.int32)
        larger[: self._used] = self._hosts[self._turn][: self._used]
        self._hosts[self._turn] = larger


@dataclass(slots=True)
class Round:
    """Row changes that one kernel launch applies: independent writes, then independent copies."""

    offsets: list[int] = field(default_factory=list)
    values: list[np.ndarray | Sequence[int]] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RoundSections:
    """Places of a round's columns in the upload. destinations, values: [N]. copies: [C, 3], at most `longest` words
    each."""

    destinations: Section | None
    values: Section | None
    copies: Section | None
    longest: int


class RowWrites:
    """Changes of a step in the device's request rows, in order; mostly a single round of writes."""

    def __init__(self) -> None:
        self._rounds = [Round()]
        self._copied_to: set[int] = set()
        self._sections: list[RoundSections] = []

    def write(self, offset: int, values: np.ndarray | Sequence[int]) -> None:
        """Record a write of int32 words ([N], or a few integers) at a word offset of the device's arena. No word may be
        written twice without a `copy` in between."""
        if len(values) == 0:
            return
        current = self._rounds[-1]
        if current.copies:
            current = self._next_round()
        current.offsets.append(offset)
        current.values.append(values)

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy `length` words after the writes so far. A source is a row's beginning or an entire earlier
        destination."""
        if length == 0:
            return
        if source in self._copied_to:
            self._next_round()
        self._rounds[-1].copies.append((source, destination, length))
        self._copied_to.add(destination)

    def add_to(self, upload: Upload) -> None:
        self._sections = [_add_round(each, upload) for each in self._rounds]

    def apply(self, upload: Upload, arena: torch.Tensor) -> None:
        """Enqueue the kernels that write the changes. arena: [words] int32."""
        for sections in self._sections:
            if sections.destinations is not None and sections.values is not None:
                write_words(arena, upload.view(sections.destinations), upload.view(sections.values))
            if sections.copies is not None:
                copy_words(arena, upload.view(sections.copies), sections.longest)

    def _next_round(self) -> Round:
        self._rounds.append(Round())
        self._copied_to = set()
        return self._rounds[-1]


def _add_round(changes: Round, upload: Upload) -> RoundSections:
    destinations = values = copies = None
    if changes.values:
        lengths = np.fromiter(map(len, changes.values), np.int64, len(changes.values))
        begins = np.cumsum(lengths) - lengths
        shifts = np.array(changes.offsets, np.int64) - begins
        destinations = upload.add(np.arange(lengths.sum()) + np.repeat(shifts, lengths))
        values = upload.add(np.concatenate(changes.values))
    if changes.copies:
        copies = upload.add(np.array(changes.copies, np.int64))
    return RoundSections(destinations, values, copies, max((length for _, _, length in changes.copies), default=0))
