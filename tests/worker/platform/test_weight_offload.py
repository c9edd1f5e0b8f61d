"""Weights of a sleeping model: nothing of them is left on the device, and all of them come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.errors import InsufficientMemoryError
from quire.worker.platform.device_memory import HostMemory
from quire.worker.platform.weight_offload import DeviceWeights, tensors_of
from tests.worker.platform.passes import SETTINGS, Passes, tiny_config

CPU = torch.device("cpu")


class NotedMemory(HostMemory):
    """pinned: bytes that are locked now."""

    pinned = 0

    def pin(self, memory: torch.Tensor) -> None:
        self.pinned += memory.nbytes

    def unpin(self, memory: torch.Tensor) -> None:
        self.pinned -= memory.nbytes


STEP = ([0, 1], [0, 0], [[1, 2], [3]])


def test_all_weights_go_and_come_back(bundled_model_path: Path) -> None:
    passes = Passes(tiny_config(bundled_model_path), SETTINGS["eager"])
    model = passes.model
    before = passes.run(*STEP)
    tensors = list(tensors_of(model))
    with torch.inference_mode():
        memory = NotedMemory()
        offloaded = DeviceWeights(model, CPU, model.weight_bytes(), memory)
        offloaded.release()
        assert offloaded.num_bytes >= model.weight_bytes()
        assert memory.pinned >= offloaded.num_bytes
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == 0
        offloaded.restore()
    assert torch.equal(passes.run(*STEP), before)
    offloaded.restore()  # nothing left to do
    for _ in range(2):
        offloaded.close()
    assert memory.pinned == 0
    assert torch.equal(passes.run(*STEP), before)


def test_views_share_their_memory_again() -> None:
    class Layer:
        def __init__(self) -> None:
            self.whole = torch.arange(8.0)
            self.parts = {"half": [self.whole[4:]]}

    Layer.__module__ = "quire.tests"
    layer = Layer()
    offloaded = DeviceWeights(layer, torch.device("cpu:0"), 32, NotedMemory())  # by another name
    assert offloaded.num_bytes == 32
    offloaded.release()
    offloaded.restore()
    layer.whole[5] = -1
    assert layer.parts["half"][0].tolist() == [4, -1, 6, 7]


def test_weights_that_were_not_found_are_a_bug_that_shows() -> None:
    with pytest.raises(AssertionError, match="were found"):
        DeviceWeights({"a": torch.zeros(2)}, CPU, 9, NotedMemory())


def test_without_memory_on_the_host_nothing_has_changed() -> None:
    class Full(NotedMemory):
        def pin(self, memory: torch.Tensor) -> None:
            raise InsufficientMemoryError("the system refuses to lock 32 bytes")

    weights = torch.arange(8.0)
    with pytest.raises(InsufficientMemoryError, match="32 bytes for sleeping weights; sleep at level 2"):
        DeviceWeights({"a": weights}, CPU, 32, Full())
    assert weights.tolist() == list(range(8))
