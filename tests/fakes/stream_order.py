"""Whether the streams' events order what shares memory: accesses of one stream to another's data, without an event in
between, are races on a card, where the host's own streams would never show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.kernels.triton.runtime import recorded_launches
from quire.worker.platform.streams import PassedEvent
from tests.fakes.streams import NamedStreams

Clock = dict[str, int]
"""For each stream, how many of its accesses are known to have ended."""


class CheckedStreams(NamedStreams):
    """Streams that run on the host and check each access to `watched` memory against the accesses before it.

    races: what two streams would do to one memory at once. lost: (stream, stream) pairs; events of the second that the
    first is told to wait for are ignored, as if the code had left the wait out.
    """

    def __init__(self) -> None:
        self.watched: set[int] = set()
        self.races: list[str] = []
        self.lost: set[tuple[str, str]] = set()
        self.num_accesses = 0
        self.host_waits = 0
        self.overlaps = 0
        self._current = "compute"
        self._clocks: dict[str, Clock] = {}
        self._history: dict[int, list[tuple[str, int, bool, str]]] = {}

    def record(self) -> PassedEvent:
        return CheckedEvent(self, self._current, dict(self._clock(self._current)))

    def wait(self, recorded_on: str, clock: Clock) -> None:
        if (self._current, recorded_on) not in self.lost:
            own = self._clock(self._current)
            own.update({stream: max(number, own.get(stream, 0)) for stream, number in clock.items()})

    def access(self, tensors: Sequence[torch.Tensor], what: str, *, writes: bool) -> None:
        """The stream of this context reads or overwrites the tensors."""
        stream, clock = self._current, self._clock(self._current)
        for memory in {tensor.untyped_storage().data_ptr() for tensor in tensors} & self.watched:
            history = self._history.setdefault(memory, [])
            self.num_accesses += 1
            clock[stream] = clock.get(stream, 0) + 1
            for other, number, wrote, before in history:
                if (writes or wrote) and clock.get(other, 0) < number:
                    self.races.append(f"{what} on {stream} beside {before} on {other}")
            self.overlaps += writes and self._clock("compute").get("compute", 0) > clock.get("compute", 0)
            history.append((stream, clock[stream], writes, what))

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Operators of torch and launches of kernels count as accesses."""
        with _Operators(self), recorded_launches(_Launches(self)):
            yield

    def _clock(self, stream: str) -> Clock:
        return self._clocks.setdefault(stream, {})

    @contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        before, self._current = self._current, name
        try:
            yield
        finally:
            self._current = before


class CheckedEvent(PassedEvent):
    def __init__(self, streams: CheckedStreams, stream: str, clock: Clock) -> None:
        self._streams, self._stream, self._clock = streams, stream, clock

    def wait(self) -> None:
        self._streams.wait(self._stream, self._clock)

    def synchronize(self) -> None:
        self._streams.host_waits += 1


class _Operators(TorchDispatchMode):
    def __init__(self, streams: CheckedStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if not func.is_view:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
                changed = argument.alias_info is not None and argument.alias_info.is_write
                self._streams.access(tensors, str(func), writes=changed)
        return func(*args, **kwargs)


class _Launches:
    """Kernels read uploads and never write them."""

    def __init__(self, streams: CheckedStreams) -> None:
        self._streams = streams

    def launch(self, kernel: Any, grid: Any, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        self._streams.access(tensors, kernel.__name__, writes=False)
        kernel[grid](*args, **constants)
