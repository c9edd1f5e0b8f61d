"""CUDA graph capture behind an interface that tests can implement without a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from quire.utils.garbage import without_collections


class Graph(Protocol):
    """CUDA graph: recorded work on tensors at fixed addresses, replayed in each step of its size."""

    def replay(self) -> None:
        """Enqueue the recorded work on the current stream."""
        ...


class GraphCapture(Protocol):
    """Makes graphs. Work between `begin_capture` and `end_capture` is recorded, not run. Graphs of one GraphCapture
    share memory, so only results of the last replayed graph and its continuations are valid. Outside tensors that a
    graph reads must outlive it."""

    def begin_capture(self) -> None: ...

    def end_capture(self) -> Graph: ...

    def abandon(self) -> None:
        """End the capture after an error."""
        ...

    def make_room(self) -> None:
        """Free torch's reserve, which a capture cannot use, before a second try."""
        ...

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """View of a tensor that does not keep its memory alive. Graphs' results are kept so."""
        ...


@contextmanager
def capturing(capture: GraphCapture) -> Iterator[None]:
    """Context for captures, without garbage collection: an error abandons the open one."""
    with without_collections():
        try:
            yield
        except BaseException:
            capture.abandon()
            raise


class CudaGraphCapture:
    """Captures torch.cuda.CUDAGraph objects on the current stream, which must not be the default one."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._current: torch.cuda.CUDAGraph | None = None

    def begin_capture(self) -> None:
        assert self._current is None, "one capture at a time"
        if not self._alive:
            # torch adds no graph to a pool whose graphs have all been freed (a first capture ran out of memory).
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads (a front end, another engine) may go on using the device.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._current = graph

    def end_capture(self) -> Graph:
        assert self._current is not None, "begin_capture comes first"
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
                # The capture is invalid already; the call has taken the stream out of capture mode.
                graph.reset()

    def make_room(self) -> None:
        torch.cuda.empty_cache()

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous(), "only memory in one piece is borrowed"
        view = _Memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return torch.as_tensor(view, device=tensor.device).view(tensor.dtype).view(tensor.shape)


class _Memory:
    """Device memory of another owner, described by `__cuda_array_interface__` so torch can wrap it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
