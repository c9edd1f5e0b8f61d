"""Device's streams: compute, block transfers, input copies, result copies and loads of adapters. On a GPU they are CUDA
streams, ordered by events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from quire.worker.platform.interface import PendingCopy


class StreamEvent(Protocol):
    """Recorded point in a device's stream of work, to wait for."""

    def wait(self) -> None:
        """Order later work in the current context after the event; the host continues."""
        ...

    def synchronize(self) -> None:
        """Wait on the host."""
        ...


class DeviceStreams(Protocol):
    """Streams of a device, used by one thread at a time, any thread."""

    @property
    def device(self) -> torch.device: ...

    def computing(self) -> AbstractContextManager[object]:
        """Context for work and allocations on the compute stream."""
        ...

    def transferring(self) -> AbstractContextManager[object]:
        """Context for work on the transfer stream."""
        ...

    def copying_in(self) -> AbstractContextManager[object]:
        """Context for work on the input-copy stream. Allocate its memory outside, for the compute stream, which reads
        it."""
        ...

    def loading(self) -> AbstractContextManager[object]:
        """Context for copies of adapters, in any thread, beside the thread of the others."""
        ...

    def record(self) -> StreamEvent:
        """Current point in the context's stream."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised pinned host memory, for asynchronous copies."""
        ...

    def copy_out(self, tensors: Iterable[torch.Tensor]) -> PendingCopy:
        """Copy what the compute stream has computed so far to the host, on a separate stream. Until the copy was waited
        for, keep the returned object and do not overwrite the tensors."""
        ...

    def synchronize(self) -> None:
        """Wait on the host for all streams."""
        ...


class CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute = torch.cuda.Stream(device)
        self._transfer = torch.cuda.Stream(device)
        self._copy_in = torch.cuda.Stream(device)
        self._copy_out = torch.cuda.Stream(device)
        self._load = torch.cuda.Stream(device)

    def computing(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._compute)

    def transferring(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._transfer)

    def copying_in(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._copy_in)

    def loading(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._load)

    def record(self) -> StreamEvent:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def copy_out(self, tensors: Iterable[torch.Tensor]) -> CudaCopy:
        with torch.cuda.stream(self._copy_out):
            self._copy_out.wait_stream(self._compute)
            sources = list(tensors)
            hosts = [self.pinned(tensor.shape, tensor.dtype) for tensor in sources]
            for host, tensor in zip(hosts, sources, strict=True):
                host.copy_(tensor, non_blocking=True)
            return CudaCopy(self.record(), hosts, sources)

    def synchronize(self) -> None:
        for stream in (self._compute, self._transfer, self._copy_in, self._copy_out, self._load):
            stream.synchronize()


class CudaCopy:
    """Copy from a GPU to pinned host memory, in progress (PendingCopy)."""

    def __init__(self, event: StreamEvent, hosts: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self._event = event
        self._hosts = hosts
        self._sources = sources

    def wait(self) -> list[torch.Tensor]:
        self._event.synchronize()
        self._sources.clear()
        return self._hosts


class HostStreams:
    """DeviceStreams of Triton's interpreter: work has run at once."""

    device = torch.device("cpu")

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def transferring(self) -> AbstractContextManager[object]:
        return nullcontext()

    def copying_in(self) -> AbstractContextManager[object]:
        return nullcontext()

    def loading(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self) -> PassedEvent:
        return PassedEvent()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def copy_out(self, tensors: Iterable[torch.Tensor]) -> HostCopy:
        return HostCopy([tensor.clone() for tensor in tensors])

    def synchronize(self) -> None:
        """Does nothing."""


class PassedEvent:
    """StreamEvent of HostStreams, which has always passed."""

    def wait(self) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""


class HostCopy:
    """PendingCopy whose tensors are on the host already."""

    def __init__(self, hosts: list[torch.Tensor]) -> None:
        self._hosts = hosts

    def wait(self) -> list[torch.Tensor]:
        return self._hosts


def make_streams(device: torch.device) -> DeviceStreams:
    """Streams of the worker's device; call once."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
