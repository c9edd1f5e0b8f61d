"""Stages of a pipeline, and the links between them."""

from __future__ import annotations

import mmap
import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from quire.parallel.link_files import NUM_SLOTS, LinkFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire.parallel.mesh import Place
    from quire.parallel.torch_dist import NetworkMeeting

SlotT = TypeVar("SlotT")


class Link(Protocol):
    """One end of a link between stages, which holds NUM_SLOTS tensors; they arrive in order."""

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor, once fewer than NUM_SLOTS are under way."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Next tensor, when it has come, valid until `release`."""
        ...

    def release(self) -> None:
        """Give up the tensor received last, once it is read."""
        ...


class SharedMemoryLink:
    """Link within one host, over LinkFiles' memory."""

    def __init__(self, files: LinkFiles) -> None:
        """Takes ownership of the descriptors."""
        size = os.fstat(files.memory).st_size
        self._files = files
        self._slots = torch.frombuffer(mmap.mmap(files.memory, size), dtype=torch.uint8).view(NUM_SLOTS, -1)
        self._next = 0

    def send(self, tensor: torch.Tensor) -> None:
        """Copy a contiguous tensor into the next slot, once it is free."""
        os.eventfd_read(self._files.free)
        data = tensor.view(torch.uint8).view(-1)
        self._turn()[: data.numel()].copy_(data)
        os.eventfd_write(self._files.full, 1)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Next tensor, when it has come: a view of its slot, valid until `release`."""
        os.eventfd_read(self._files.full)
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        return self._turn()[:num_bytes].view(dtype).view(shape)

    def release(self) -> None:
        """Free the slot received last."""
        os.eventfd_write(self._files.free, 1)

    def _turn(self) -> torch.Tensor:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % NUM_SLOTS
        return slot


class NetworkLink:
    """Link between processes of two hosts, over gloo."""

    def __init__(self, meeting: NetworkMeeting, *, sends: bool) -> None:
        """Return when both ends are there. meeting: of this link alone. sends: this end is the earlier stage's."""
        self._peer = 1 if sends else 0
        from quire.parallel.torch_dist import gloo  # one host does without torch.distributed

        self._group = gloo(meeting, 1 - self._peer, 2)
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()
        """Copies of sent tensors, which their sender may overwrite; each with what waits for its end."""

    def send(self, tensor: torch.Tensor) -> None:
        if len(self._under_way) == NUM_SLOTS:
            self._under_way.popleft()[0].wait()
        data = tensor.clone(memory_format=torch.contiguous_format)
        self._under_way.append((self._group.send([data], self._peer, 0), data))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        data = torch.empty(shape, dtype=dtype)
        self._group.recv([data], self._peer, 0).wait()
        return data

    def release(self) -> None:
        """Do nothing: a received tensor has memory of its own."""


def network_links(
    meeting: Callable[[str], NetworkMeeting], place: Place, num_stages: int
) -> tuple[Link | None, Link | None]:
    """Links of a rank from the stage before and to the next. meeting: name -> meeting of a link."""

    def link(sender: int, *, sends: bool) -> Link:
        return NetworkLink(meeting(f"link {sender} {place.pcp} {place.tp}"), sends=sends)

    # The first stage's links come first: each stage waits for the one before it.
    before = link(place.pp - 1, sends=False) if place.pp > 0 else None
    return before, link(place.pp, sends=True) if place.pp + 1 < num_stages else None


@dataclass(frozen=True)
class Stage:
    """Run of a model's layers on this rank, by number. count: stages of the model. incoming, outgoing: links to its
    neighbours (None: none)."""

    number: int = 0
    count: int = 1
    layers: range = range(0)
    incoming: Link | None = None
    outgoing: Link | None = None

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def at_entrance(self, slots: dict[str, SlotT], *, is_head: bool = False) -> dict[str, SlotT]:
        """Weight slots before the first layer: `slots` on the first stage, none on others. is_head: the last stage
        reads it too."""
        return slots if self.is_first or (is_head and self.is_last) else {}

    def at_exit(self, slots: dict[str, SlotT]) -> dict[str, SlotT]:
        """Weight slots after the last layer: `slots` on the last stage, none on others."""
        return slots if self.is_last else {}


WHOLE_MODEL = Stage()
"""Only stage of a model without a pipeline."""
