"""Weights of a sleeping model: parked in memory of the host, and brought back to where the model's layers expect them.

The tensors stay what they are; only the memory behind them is let go, and later made anew, at other addresses. Graphs
and tables of addresses must be made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

PACKAGE = "quire."


class ParkedWeights:
    """The memory of every tensor of `model` that lies on `device` (of which a process has one of a kind)."""

    def __init__(self, model: object, device: torch.device, num_bytes: int) -> None:
        """Copies to the host and gives the device's memory back. num_bytes: of the model's weights, which must all have
        been found."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in tensors_of(model)
            if tensor.device.type == device.type and tensor.untyped_storage().nbytes()
        }
        found = sum(storage.nbytes() for storage in storages.values())
        assert found >= num_bytes, f"the model has {num_bytes} bytes of weights, and {found} of them were found"
        self._parked = [(storage, _host_copy(storage)) for storage in storages.values()]
        for storage in storages.values():
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """On the host."""
        return sum(host.nbytes() for _, host in self._parked)

    def restore(self) -> None:
        """Bring everything back; may be called again after an error. Raises torch.OutOfMemoryError."""
        while self._parked:
            storage, host = self._parked[-1]
            storage.resize_(host.nbytes())
            storage.copy_(host)
            self._parked.pop()


def _host_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    host = torch.UntypedStorage(storage.nbytes())
    host.copy_(storage)
    return host


def tensors_of(root: object) -> Iterator[torch.Tensor]:
    """Every tensor that is reachable from `root` by attributes of this package's objects and by containers."""
    seen: set[int] = set()
    waiting: list[object] = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        else:
            waiting.extend(_parts(item))


def _parts(item: Any) -> list[object]:
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if isinstance(item, type) or not type(item).__module__.startswith(PACKAGE):
        return []
    parts = list(getattr(item, "__dict__", {}).values())
    if is_dataclass(item):  # those with slots have no __dict__
        parts += [getattr(item, each.name) for each in fields(item)]
    return parts
