"""Drivers over executors of tiny models, on every platform that a host can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.executors.local import LocalExecutor
from quire.kv_cache.layout import KVCacheLayout, group_layers
from tests.fakes.host_math import HostMathExecutor
from tests.models.families import FAMILIES
from tests.models.harness import randomize, save
from tests.worker.driver import Driver

MakeDriver = Callable[..., Driver]
DEVICE = {"device": "cpu", "attention_backend": "triton", "dtype": "float32", "max_model_len": 128}
PLATFORMS = {"cpu": (LocalExecutor, {"num_threads": 1}), "device": (HostMathExecutor, DEVICE)}
"""The executor and its options. A device's model is computed by plain operators (tests/fakes/host_math.py)."""


ON_A_CPU = pytest.mark.parametrize("platform", ["cpu"], indirect=True)
"""For tests of hundreds of steps, whose kinds of plans shorter tests run on a device as well."""


@pytest.fixture(scope="session")
def reference() -> PreTrainedModel:
    """Transformers' own instance of the tiny LLaMA."""
    return randomize(FAMILIES["llama"]())


@pytest.fixture(scope="session")
def model_path(reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference, tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=list(PLATFORMS))
def platform(request: pytest.FixtureRequest) -> str:
    """Where the drivers' plans run. A test of one platform parametrises it indirectly."""
    name: str = request.param
    if name == "device":
        request.getfixturevalue("fixed_order_of_module")  # tokens and bits are compared
        request.getfixturevalue("no_overflow_checks")  # hundreds of steps are interpreted
    return name


@pytest.fixture
def executors() -> Iterator[list[LocalExecutor]]:
    """Executors that a test made; shut down after it."""
    made: list[LocalExecutor] = []
    yield made
    for executor in made:
        executor.shutdown()


@pytest.fixture
def make_driver(platform: str, model_path: Path, executors: list[LocalExecutor]) -> MakeDriver:
    """Make a Driver over a fresh executor of the tiny LLaMA; keywords: block_size, and engine options."""

    def make(*, block_size: int = 16, num_blocks: int = 200, **options: object) -> Driver:
        make_executor, defaults = PLATFORMS[platform]
        settings = {"model": str(model_path), "max_num_seqs": 8, "block_size": block_size, **defaults, **options}
        executor = make_executor(resolve(EngineOptions.from_keywords(settings)))
        executors.append(executor)
        groups, layers_per_group = group_layers(executor.load_model(), block_size)
        executor.allocate(KVCacheLayout(block_size, num_blocks, groups, layers_per_group))
        return Driver(executor.execute, block_size=block_size, num_blocks=num_blocks)

    return make
