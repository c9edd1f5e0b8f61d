"""What is asked of torch.cuda, where there is no card: in which order, and that the installed torch takes it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.errors import InsufficientMemoryError
from quire.worker.platform.device_memory import CudaMemory
from quire.worker.platform.graph_capture import CudaGraphCapture, capturing
from quire.worker.platform.streams import CudaStreams

CUDA = torch.device("cuda")
Calls = list[tuple[Any, ...]]


def takes(function: Any, *args: Any, **keywords: Any) -> None:
    """Raise TypeError unless `function` can be called so."""
    inspect.signature(function).bind(*args, **keywords)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What was called on the fakes that stand for torch.cuda in this test."""
    made: Calls = []
    real = {name: getattr(torch.cuda, name) for name in ("CUDAGraph", "Stream", "Event", "empty_cache")}

    class FakeGraph:
        def capture_begin(self, **keywords: Any) -> None:
            takes(real["CUDAGraph"].capture_begin, self, **keywords)
            made.append(("begin", keywords["pool"], keywords["capture_error_mode"]))

        def capture_end(self) -> None:
            made.append(("end",))

        def reset(self) -> None:
            made.append(("reset",))

    class FakeStream:
        names: Iterator[str] = iter(("compute", "transfer", "copy in", "copy out", "load"))

        def __init__(self, device: torch.device) -> None:
            takes(real["Stream"].__new__, real["Stream"], device)
            self.name = next(self.names)

        def wait_stream(self, other: FakeStream) -> None:
            made.append((self.name, "waits for", other.name))

        def synchronize(self) -> None:
            made.append((self.name, "synchronize"))

    class FakeEvent:
        def record(self, stream: FakeStream) -> None:
            takes(real["Event"].record, self, stream)
            made.append(("record", stream.name))
            self.name = stream.name

        def wait(self) -> None:
            made.append((current[-1].name, "waits for", self.name))

        def synchronize(self) -> None:
            made.append(("the host waits for", self.name))

    current: list[Any] = []

    @contextmanager
    def stream(entered: FakeStream) -> Iterator[None]:
        current.append(entered)
        yield
        current.pop()

    pools = iter(range(100))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.append(("empty_cache",)))
    return made


def test_graphs_share_a_pool_as_long_as_one_of_them_lives(calls: Calls) -> None:
    """torch refuses a pool whose last graph is gone, as it is when a first capture has run out of memory."""
    capture = CudaGraphCapture()

    def pool_of_next(*, fails: bool = False) -> Any:
        with capturing(capture):
            capture.begin_capture()
            pool = calls[-1][1]
            if fails:
                raise torch.OutOfMemoryError
            return pool, capture.end_capture()

    with pytest.raises(torch.OutOfMemoryError):
        pool_of_next(fails=True)
    failed = calls[0][1]
    first, graph = pool_of_next()
    second, other = pool_of_next()
    assert failed != first == second
    assert [call[2] for call in calls if call[0] == "begin"] == ["thread_local"] * 3
    del graph, other
    third, _ = pool_of_next()
    assert third != first


def test_a_result_waits_for_what_was_computed_and_for_nothing_else(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy runs behind the compute stream, on its own; the host waits for the copy; sources live until then."""
    streams = CudaStreams(CUDA)
    monkeypatch.setattr(streams, "pinned", lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    source = torch.arange(3)
    with streams.computing():
        copy = streams.copy_out([source])
    assert calls == [("copy out", "waits for", "compute"), ("record", "copy out")]
    assert copy._sources[0] is source
    assert copy.wait()[0].tolist() == [0, 1, 2]
    assert calls[2:] == [("the host waits for", "copy out")]
    assert not copy._sources


def test_an_event_is_of_the_stream_that_one_is_in(calls: Calls) -> None:
    streams = CudaStreams(CUDA)
    with streams.computing():
        computed = streams.record()
        for beside in (streams.transferring, streams.copying_in, streams.loading):
            with beside():
                computed.wait()
                done = streams.record()
            done.wait()
    assert calls == [
        ("record", "compute"),
        ("transfer", "waits for", "compute"),
        ("record", "transfer"),
        ("compute", "waits for", "transfer"),
        ("copy in", "waits for", "compute"),
        ("record", "copy in"),
        ("compute", "waits for", "copy in"),
        ("load", "waits for", "compute"),
        ("record", "load"),
        ("compute", "waits for", "load"),
    ]


def test_the_end_waits_for_every_stream(calls: Calls) -> None:
    CudaStreams(CUDA).synchronize()
    assert [name for name, _ in calls] == ["compute", "transfer", "copy in", "copy out", "load"]


def test_memory_that_the_system_does_not_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reports the error at the next launch: that must not be a step's."""

    launches: list[Any] = []

    def zeros(*shape: int, device: torch.device) -> torch.Tensor:
        launches.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(InsufficientMemoryError, match=r"lock 64 B of host memory \(CUDA error 2\)"):
        CudaMemory(CUDA).pin(torch.empty(64, dtype=torch.uint8))
    assert launches == [CUDA]
