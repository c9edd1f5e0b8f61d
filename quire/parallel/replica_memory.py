"""Memory that replicas of an engine share, so that they step together."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from contextlib import suppress

from quire.config.parallel import ReplicaSet
from quire.errors import QuireError

_COUNTER = struct.Struct("q")
_COUNTER_BYTES = 64


class CommonMemory:
    """Memory and bells of a generation of replicas, kept by their parent."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._descriptors: list[int] = []
        self._lock = threading.RLock()
        self.generation = 0
        self.renew()

    def renew(self) -> None:
        with self._lock:
            self.close()
            self.generation += 1
            self._descriptors.append(os.memfd_create("quire-replicas"))
            os.truncate(self._descriptors[0], mmap.ALLOCATIONGRANULARITY)
            for _ in range(self._count):
                self._descriptors += os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def of_replica(self, number: int) -> ReplicaSet:
        with self._lock:
            memory, *bells = (f"/proc/{os.getpid()}/fd/{each}" for each in self._descriptors)
        return ReplicaSet(number, memory, tuple(bells[::2]))

    def close(self) -> None:
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.pop())


class CommonSteps:
    are_common = True

    def __init__(self, replicas: ReplicaSet) -> None:
        size = mmap.ALLOCATIONGRANULARITY
        self._counts = map_shared(replicas.memory, size, 0, size)
        self._number, self._others = (
            replicas.number,
            [each for each in range(replicas.count) if each != replicas.number],
        )
        self._bells = [os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC) for path in replicas.bells]
        self._own = 0
        """Steps begun, and one from the arrival on."""

    @property
    def bell(self) -> int:
        """Descriptor that is readable once a step has begun elsewhere."""
        return self._bells[self._number]

    @property
    def may_begin(self) -> bool:
        return all(self._count(other) for other in self._others)

    def arrive(self) -> None:
        self.count_step()

    @property
    def is_behind(self) -> bool:
        return any(self._count(other) > max(self._own, 1) for other in self._others)

    def count_step(self) -> None:
        self._own += 1
        _COUNTER.pack_into(self._counts, self._number * _COUNTER_BYTES, self._own)
        for other in self._others:
            if self._count(other) < self._own:
                with suppress(BlockingIOError):  # it has been woken often enough
                    os.write(self._bells[other], b"1")

    def hush(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.bell, 65536)

    def close(self) -> None:
        while self._bells:
            os.close(self._bells.pop())

    def _count(self, number: int) -> int:
        count: int = _COUNTER.unpack_from(self._counts, number * _COUNTER_BYTES)[0]
        return count


def map_shared(path: str, size: int, start: int, num_bytes: int) -> mmap.mmap:
    """Part of a mapped file, made `size` bytes long. Raises QuireError."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise QuireError(f"the memory that replicas share cannot be reached: {path}: {error}") from None
    try:
        if os.fstat(descriptor).st_size < size:
            os.truncate(descriptor, size)  # all ranks want the same size
        return mmap.mmap(descriptor, num_bytes, offset=start)
    finally:
        os.close(descriptor)
