"""Executors over tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.executors.inprocess import InProcessExecutor
from quire.kv_cache.layout import KVCacheLayout, group_layers
from tests.models.families import FAMILIES
from tests.models.harness import randomize, save
from tests.worker.driver import Driver

MakeDriver = Callable[..., Driver]


@pytest.fixture(scope="session")
def reference() -> PreTrainedModel:
    """Transformers' own instance of the tiny LLaMA."""
    return randomize(FAMILIES["llama"]())


@pytest.fixture(scope="session")
def model_path(reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def executors() -> Iterator[list[InProcessExecutor]]:
    """Executors that a test made; shut down after it."""
    made: list[InProcessExecutor] = []
    yield made
    for executor in made:
        executor.shutdown()


@pytest.fixture
def make_driver(model_path: Path, executors: list[InProcessExecutor]) -> MakeDriver:
    """Make a Driver over a fresh executor of the tiny LLaMA; keywords: block_size, and engine options."""

    def make(*, block_size: int = 16, num_blocks: int = 200, **options: object) -> Driver:
        settings = {"model": str(model_path), "num_threads": 1, "max_num_seqs": 8, "block_size": block_size, **options}
        executor = InProcessExecutor(resolve(EngineOptions.from_keywords(settings)))
        executors.append(executor)
        groups, layers_per_group = group_layers(executor.load_model(), block_size)
        executor.allocate(KVCacheLayout(block_size, num_blocks, groups, layers_per_group))
        return Driver(executor.execute, block_size=block_size, num_blocks=num_blocks)

    return make
