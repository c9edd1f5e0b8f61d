"""A step is enqueued without asking the device for anything, and its result is taken later."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.errors import QuireError
from quire.executors.device import DeviceExecutor
from quire.kernels.triton.runtime import recorded_launches
from quire.sampling_params import SamplingParams
from quire.step import SequenceFork, StepPlan
from quire.worker.device.pending import PendingStep
from tests.worker.device.conftest import MakeDriver
from tests.worker.driver import GREEDY, Driver, sampling_of

WAITING_OPERATORS = {
    "aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero", "aten.equal", "aten.unique2",
    "aten._unique2", "aten.unique_consecutive", "aten.bincount", "aten.item", "aten.repeat_interleave",
}  # fmt: skip
"""What makes a value or a size known to the host, or needs one from the device to go on."""
WAITING_METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")


class Asked(Exception):
    """The host asked the device for a value."""


class NoQuestions(TorchDispatchMode):
    """Refuses operators that wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = str(func).rsplit(".", 1)[0]
        by_mask = name in ("aten.index", "aten.index_put", "aten.index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITING_OPERATORS or by_mask:
            raise Asked(name)
        return func(*args, **(kwargs or {}))


class Kernels:
    """Runs kernels with the methods of tensors as they were: the interpreter itself reads memory."""

    def __init__(self, methods: dict[str, Any]) -> None:
        self.methods = methods
        self.num_launches = 0

    def launch(self, kernel: Any, grid: Any, args: Any, constants: Any) -> None:
        self.num_launches += 1
        refusing = {name: getattr(torch.Tensor, name) for name in self.methods}
        set_methods(self.methods)
        try:
            kernel[grid](*args, **constants)
        finally:
            set_methods(refusing)


def set_methods(methods: dict[str, Any]) -> None:
    for name, method in methods.items():
        setattr(torch.Tensor, name, method)


@contextmanager
def nothing_is_asked(pinned: list[int]) -> Iterator[Kernels]:
    """Inside, no tensor may be read by the host but those whose memory is in `pinned`, which is the host's."""
    methods = {name: getattr(torch.Tensor, name) for name in WAITING_METHODS}

    def refusing(name: str) -> Callable[..., Any]:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.untyped_storage().data_ptr() not in pinned:
                raise Asked(f"Tensor.{name}")
            return methods[name](self, *args, **kwargs)

        return method

    kernels = Kernels(methods)
    set_methods({name: refusing(name) for name in WAITING_METHODS})
    try:
        with NoQuestions(), recorded_launches(kernels):
            yield kernels
    finally:
        set_methods(methods)
