"""Weight offload: moves a sleeping model's weights to host memory and back into the same tensor objects, at other
addresses: CUDA graphs must be rebuilt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from quire.errors import InsufficientMemoryError
from quire.kernels.cpu.memory import ALIGNMENT, allocate
from quire.worker.platform.device_memory import DeviceMemory, arithmetic

PACKAGE = "quire."


class DeviceWeights:
    """Contents of every tensor of `model` on `device`, in pinned host memory. A process has one device of each type."""

    def __init__(self, model: object, device: torch.device, num_bytes: int, memory: DeviceMemory) -> None:
        """Copy the weights to the host; device memory stays until `release`. num_bytes: bytes of the model's weights,
        to check that all were found. Raises InsufficientMemoryError if the host lacks memory."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in tensors_of(model)
            if tensor.device.type == device.type and tensor.untyped_storage().nbytes()
        }
        found = sum(storage.nbytes() for storage in storages.values())
        assert found >= num_bytes, f"the model has {num_bytes} bytes of weights, and {found} of them were found"
        self.num_bytes = found
        self._memory = memory
        self._host = allocate(sum(_aligned(storage.nbytes()) for storage in storages.values()))
        try:
            memory.pin(self._host)
        except InsufficientMemoryError as error:
            raise InsufficientMemoryError(f"{error} for sleeping weights; sleep at level 2 needs none") from None
        self._offloaded: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        start = 0
        for storage in storages.values():
            host = self._host[start : start + storage.nbytes()]
            host.copy_(_bytes_of(storage))
            self._offloaded.append((storage, host))
            start += _aligned(storage.nbytes())

    def release(self) -> None:
        for storage, _ in self._offloaded:
            storage.resize_(0)

    def restore(self) -> None:
        """Copy everything back; may be repeated after an error. Raises InsufficientMemoryError."""
        with arithmetic(self._memory, "the weights of a sleeping model", self.num_bytes):
            while self._offloaded:
                storage, host = self._offloaded[-1]
                storage.resize_(host.nbytes)
                _bytes_of(storage).copy_(host)
                self._offloaded.pop()

    def close(self) -> None:
        """Free the host memory. Idempotent."""
        self._offloaded.clear()
        if len(self._host):
            self._memory.unpin(self._host)
            self._host = self._host[:0]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def tensors_of(root: object) -> Iterator[torch.Tensor]:
    """Tensors reachable from `root` through this package's objects and containers: weights that sleep moves."""
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
