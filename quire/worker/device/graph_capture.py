"""CUDA graphs behind a small seam, so that what is recorded can be tested where there is no GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Work that was recorded once, on tensors at fixed addresses."""

    def replay(self) -> None:
        """Enqueue all of it, on the stream of the context that one is in."""
        ...


class GraphCapture(Protocol):
    """Makes graphs. Work between `begin` and `end` is recorded and not run: what it would compute is not there yet.

    Graphs of one capture share memory for what they compute on the way: of all graphs, only the one that was replayed
    last (with those that continue it) has left results. The tensors that a graph reads from outside must outlive it.
    """

    def begin_capture(self) -> None: ...

    def end_capture(self) -> Graph: ...

    def abandon(self) -> None:
        """After an error between `begin` and `end`."""
        ...

    def make_room(self) -> None:
        """Give back what torch keeps in reserve: a capture takes its memory from the device, and cannot use that."""
        ...

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without keeping it: once the tensor is gone, later captures may use it for something else."""
        ...


@contextmanager
def capturing(capture: GraphCapture) -> Iterator[None]:
    """For a body that begins and ends captures. An error leaves no capture open; and no garbage is collected meanwhile,
    because freeing another graph's memory is an error during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    except BaseException:
        capture.abandon()
        raise
    finally:
        if was_enabled:
            gc.enable()


class CudaGraphCapture:
    """torch.cuda.CUDAGraph, captured on the stream of the context that one is in, which is not the default stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._current: torch.cuda.CUDAGraph | None = None

    def begin_capture(self) -> None:
        assert self._current is None, "one capture at a time"
        if not self._alive:
            # torch takes no more graphs into a pool whose graphs are all gone (a first capture ran out of memory).
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads (a front end, another engine) may go on using the device.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._current = graph

    def end_capture(self) -> Graph:
        assert self._current is not None, "begin comes first"
        graph, self._current = self._current, None
        graph.capture_end()
        self._alive.add(graph)
        return graph

    def abandon(self) -> None:
        graph, self._current = self._current, None
        if graph is not None:
            try:
                graph.capture_end()
            except RuntimeError:
                # The capture is invalid already; what matters is that the stream has left it.
                graph.reset()

    def make_room(self) -> None:
        torch.cuda.empty_cache()

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous(), "only memory in one piece is borrowed"
        view = _Memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return torch.as_tensor(view, device=tensor.device).view(tensor.dtype).view(tensor.shape)


class _Memory:
    """Device memory with another owner, described by `__cuda_array_interface__` so that torch can wrap it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
