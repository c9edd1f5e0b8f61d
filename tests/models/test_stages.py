"""Families whose layers are dealt to the stages of a pipeline: the bits of the whole model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.kernels.cpu.runtime import NativeRuntime
from quire.models.loader import load_model
from quire.parallel.link_files import LinkFiles
from quire.parallel.single import SINGLE_RANK
from quire.parallel.stage import WHOLE_MODEL, SharedMemoryLink, Stage
from tests.fakes.gguf_model import MIXED, WIDE, to_gguf
from tests.long import all_but_long
from tests.models.conftest import SavedModel
from tests.models.families import qwen3
from tests.models.harness import PagedRunner, chunked_logits, random_prompts, randomize
from tests.models.test_native_ranks import NativeRunner

SavedModels = Callable[[str], SavedModel]
PROMPTS = random_prompts([20, 7], 97)
NATIVE = ["llama", "gemma2", "mixtral", "deepseek-v3", "qwen3-next"]
PLAIN = ["llama-biases", "gpt2-variant", "opt-350m"]


class WithoutLogits:
    """A stage that is not the last, whose passes are run for what they send."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), 1)


def stages_of(count: int, num_layers: int, hidden_size: int) -> list[Stage]:
    """Stages that threads of this process can be, of runs of layers that are as equal as can be."""
    borders = [num_layers * number // count for number in range(count + 1)]
    files = [LinkFiles.create(4 * 64 * hidden_size) for _ in range(count - 1)]
    outgoing = [*map(SharedMemoryLink, files), None]
    copies = [LinkFiles(*map(os.dup, each)) for each in files]
    incoming = [None, *map(SharedMemoryLink, copies)]
    return [
        Stage(number, count, range(borders[number], borders[number + 1]), incoming[number], outgoing[number])
        for number in range(count)
    ]


def logits_of(directory: Path, stage: Stage, *, is_native: bool) -> torch.Tensor:
    config = load_model_config(str(directory), dtype="float32", max_model_len=None, revision=None, config_only=False)
    runtime = NativeRuntime("auto", 1) if is_native else None
    model: Any = load_model(config, LoadConfig("auto", 0), SINGLE_RANK, runtime=runtime, stage=stage)
    if not stage.is_last:
        model = WithoutLogits(model)
    runner = NativeRunner(model, num_heads=config.num_heads) if is_native else PagedRunner(model)
    return torch.cat(chunked_logits(runner, PROMPTS, 9))


def run_stages(stages: Sequence[Stage], work: Callable[[Stage], Any]) -> Any:
    """What the last stage gives."""
    with ThreadPoolExecutor(len(stages)) as pool:
        return [future.result() for future in [pool.submit(work, stage) for stage in stages]][-1]


@pytest.mark.parametrize("family", all_but_long(NATIVE, ["gemma2", "qwen3-next"]))
def test_two_stages_on_native_kernels(saved_model: SavedModels, family: str) -> None:
    _check(saved_model(family), 2, is_native=True)


@pytest.mark.parametrize("family", all_but_long(PLAIN, ["opt-350m"]))
def test_two_stages_on_plain_torch(saved_model: SavedModels, family: str) -> None:
    _check(saved_model(family), 2, is_native=False)


def _check(saved: SavedModel, count: int, *, is_native: bool) -> None:
    sizes = saved.reference.config
    stages = stages_of(count, sizes.num_hidden_layers, sizes.hidden_size)
    found = run_stages(stages, lambda stage: logits_of(saved.directory, stage, is_native=is_native))
    assert torch.equal(found, logits_of(saved.directory, WHOLE_MODEL, is_native=is_native))


def test_the_stages_of_a_gguf_file(tmp_path: Path) -> None:
    path = to_gguf(randomize(qwen3(**WIDE)), "qwen3", MIXED)[0].write(tmp_path / "model.gguf")
    found = run_stages(stages_of(2, 2, 256), lambda stage: logits_of(path, stage, is_native=True))
    assert torch.equal(found, logits_of(path, WHOLE_MODEL, is_native=True))
