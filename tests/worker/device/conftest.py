"""Drivers over the device worker, its model computed by plain operators (tests/fakes/host_math.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.executors.device import DeviceExecutor
from quire.kv_cache.layout import KVCacheLayout, group_layers
from tests.fakes.host_math import HostMathExecutor
from tests.worker.driver import Driver

MakeDriver = Callable[..., Driver]
DEVICE = {"device": "cpu", "attention_backend": "triton", "dtype": "float32", "max_model_len": 128}


@pytest.fixture(scope="module", autouse=True)
def plain_torch(fixed_order_of_module: None, no_overflow_checks: None) -> None:
    """Tokens and bits are compared, and hundreds of steps interpreted."""


@pytest.fixture
def executors() -> Iterator[list[DeviceExecutor]]:
    """Executors that a test made; shut down after it."""
    made: list[DeviceExecutor] = []
    yield made
    for executor in made:
        executor.shutdown()


@pytest.fixture
def make_driver(model_path: Path, executors: list[DeviceExecutor]) -> MakeDriver:
    """Make a Driver over a fresh executor of the tiny LLaMA; keywords: block_size, and engine options."""

    def make(*, block_size: int = 16, num_blocks: int = 200, **options: object) -> Driver:
        settings = {"model": str(model_path), "max_num_seqs": 8, "block_size": block_size, **DEVICE, **options}
        executor = HostMathExecutor(resolve(EngineOptions.from_keywords(settings)))
        executors.append(executor)
        groups, layers_per_group = group_layers(executor.load_model(), block_size)
        executor.allocate(KVCacheLayout(block_size, num_blocks, groups, layers_per_group))
        return Driver(executor.execute, block_size=block_size, num_blocks=num_blocks)

    return make
