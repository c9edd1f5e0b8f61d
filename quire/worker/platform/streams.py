"""A device's streams, as the worker uses them: compute, transfers of blocks, the copies of inputs to the device, and
the copies of results to the host.

On a GPU these are four CUDA streams, ordered by events. In Triton's interpreter the device is the host, and everything
has happened when a call returns. `torch.cuda` is called in this folder only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from quire.worker.platform.interface import PendingCopy


class StreamEvent(Protocol):
    """A point in a stream: everything enqueued there before."""

    def wait(self) -> None:
        """Order all that is enqueued from now on, in the context one is in, behind the event. The host goes on."""
        ...

    def synchronize(self) -> None:
        """The host waits. Costs next to nothing when the point was passed."""
        ...


class DeviceStreams(Protocol):
    """Used by one thread at a time; which one does not matter, for every use names its context."""

    @property
    def device(self) -> torch.device: ...

    def computing(self) -> AbstractContextManager[object]:
        """Inside, work is enqueued on the compute stream and memory is allocated for it."""
        ...

    def transferring(self) -> AbstractContextManager[object]:
        """Inside, work is enqueued on the transfer stream, which runs beside the compute stream."""
        ...

    def copying_in(self) -> AbstractContextManager[object]:
        """Inside, work is enqueued on the stream of input copies, which runs beside the other streams. Memory for it
        is allocated outside, for the compute stream, which reads it."""
        ...

    def record(self) -> StreamEvent:
        """A point in the stream of the context that one is in."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory, not initialised, that copies from and to the device can use beside the host's work."""
        ...

    def copy_out(self, tensors: Iterable[torch.Tensor]) -> PendingCopy:
        """Copy to the host what the compute stream has computed by this point, on a stream of its own.

        Until the copy was waited for the caller keeps the returned object, which keeps the tensors' memory, and
        overwrites none of them.
        """
        ...

    def synchronize(self) -> None:
        """The host waits for everything enqueued on any of the streams."""
        ...


class CudaStreams:
    """Streams of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute = torch.cuda.Stream(device)
        self._transfer = torch.cuda.Stream(device)
        self._copy_in = torch.cuda.Stream(device)
        self._copy_out = torch.cuda.Stream(device)

    def computing(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._compute)

    def transferring(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._transfer)

    def copying_in(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._copy_in)

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
        for stream in (self._compute, self._transfer, self._copy_in, self._copy_out):
            stream.synchronize()


class CudaCopy:
    """See PendingCopy."""

    def __init__(self, event: StreamEvent, hosts: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self._event = event
        self._hosts = hosts
        self._sources = sources

    def wait(self) -> list[torch.Tensor]:
        self._event.synchronize()
        self._sources.clear()
        return self._hosts


class HostStreams:
    """The streams of a device that is the host: what is enqueued has run when the call returns."""

    device = torch.device("cpu")

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def transferring(self) -> AbstractContextManager[object]:
        return nullcontext()

    def copying_in(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self) -> PassedEvent:
        return PassedEvent()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def copy_out(self, tensors: Iterable[torch.Tensor]) -> HostCopy:
        return HostCopy([tensor.clone() for tensor in tensors])

    def synchronize(self) -> None:
        """Return at once: everything has happened when a call returns."""


class PassedEvent:
    """An event that has already passed: waiting for it returns at once."""

    def wait(self) -> None:
        """It has passed."""

    def synchronize(self) -> None:
        """It has passed."""


class HostCopy:
    """See PendingCopy."""

    def __init__(self, hosts: list[torch.Tensor]) -> None:
        self._hosts = hosts

    def wait(self) -> list[torch.Tensor]:
        return self._hosts


def make_streams(device: torch.device) -> DeviceStreams:
    """The streams of the worker's device; to be made once."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
