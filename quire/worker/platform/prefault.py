"""The KV cache's first blocks get their memory from the system before requests come to them.

A block that is written for the first time waits for the system: it clears a huge page, and a virtual machine may have
to ask its host for the memory first. A thread with a lower priority than those that compute does it ahead, from the
first block on, since blocks are taken in that order (docs/decisions/0082-memory-ahead-of-requests.md).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from quire.kernels.cpu.memory import HUGE_PAGE

MOST_BYTES = 1 << 30
"""Of a pool. What lies behind is backed when it is first written: a pool larger than its load costs no more."""
NICENESS = 5
"""Threads that compute get about three times the processor that this one gets. With much less it would hold the
process's memory map, while it waits for a processor, from others that need it."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE: changes no byte, and so may run beside threads that write."""


class Prefault(Protocol):
    def wait(self) -> None:
        """Until there is nothing left to do."""
        ...

    def close(self) -> None:
        """Stop, so that the pool can be freed. Idempotent."""
        ...


class NoPrefault:
    """Memory that is backed already."""

    def wait(self) -> None:
        """It is."""

    def close(self) -> None:
        """There is nothing to stop."""


class PrefaultThread:
    def __init__(self, pages: Sequence[torch.Tensor], most_bytes: int) -> None:
        """pages: of the pool, one behind the other in each tensor. most_bytes: of all tensors together."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, args=(pages, most_bytes), name="prefault", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()

    def _run(self, pages: Sequence[torch.Tensor], most_bytes: int) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        for address, num_bytes in _pieces(pages, most_bytes):
            if self._is_closed or not _populate(address, num_bytes):
                break


def prefault(pages: Sequence[torch.Tensor], most_bytes: int) -> Prefault:
    """Begin with a pool that was just allocated. On other systems than Linux nothing is done."""
    return PrefaultThread(pages, most_bytes) if sys.platform == "linux" and pages else NoPrefault()


def _pieces(pages: Sequence[torch.Tensor], most_bytes: int) -> Iterator[tuple[int, int]]:
    """Address and bytes of what is asked for at once: at most a huge page, the same blocks of all tensors together."""
    for begin in range(0, most_bytes // len(pages), HUGE_PAGE):
        for tensor in pages:
            num_bytes = min(HUGE_PAGE, tensor.nbytes - begin, most_bytes // len(pages) - begin)
            if num_bytes > 0:
                yield tensor.data_ptr() + begin, num_bytes


def _populate(address: int, num_bytes: int) -> bool:
    """Whether the system did it: one before Linux 5.14 does not, and none without memory to give."""
    libc = ctypes.CDLL(None)
    return bool(libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _POPULATE_WRITE) == 0)
