"""Rows that take the place of tokens' embeddings, and rows behind a layer, from a source that only a test knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire.clock import SystemClock
from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.engine.core import EngineCore
from quire.engine.messages import AddRequest
from quire.executors.local import LocalExecutor
from quire.models.interface import CausalLM
from quire.models.native import NativeModel
from quire.step import StepPlan
from quire.worker.columns import STEP_COLUMNS, Column, Rule
from quire.worker.input_batch import InputBatch
from quire.worker.overlays import StepOverlay
from quire.worker.platform.cpu import CpuPlatform
from tests.executors.test_states import DEVICE, device_context, native_context, request
from tests.fakes.graph_worker import SIZES, GraphPlatform
from tests.layers.helpers import torch_context
from tests.models.harness import random_prompts
from tests.models.toy import SIZE, ToyModel
from tests.worker.test_columns import CPU, LONGEST, model_path, plain_torch, run  # noqa: F401

PLACEHOLDER, PLACES, NUM_TOKENS = 90, range(3, 14), 2
TABLE = (*STEP_COLUMNS, Column("picture", Rule.ROW))
TEXT = random_prompts([17], 90, seed=6)[0]
SEEN = [PLACEHOLDER if place in PLACES else token for place, token in enumerate(TEXT)]
PROMPTS = ((SEEN, 1), (SEEN, 2), (TEXT, 0), ([*SEEN, 5, 8], 1))
"""Tokens, and the number of the picture that they show."""


class PictureModel(ToyModel):
    columns = ("picture",)

    def __init__(self, context: Any) -> None:
        super().__init__(context, "full window")
        self.fill()

    def cache_specs(self) -> list[Any]:
        return super().cache_specs()[:2]


class OnCpu(CpuPlatform):
    def load_model(self, progress: object) -> CausalLM:
        if self._runtime is None:
            return PictureModel(torch_context())
        return NativeModel(PictureModel(native_context()), self._runtime)


class OnDevice(GraphPlatform):
    def load_model(self, progress: object) -> CausalLM:
        return PictureModel(device_context())


class Pictures:
    """An OverlaySource: by number, a picture's rows."""

    def __init__(self) -> None:
        self._shown: dict[int, int] = {}

    def of_step(self, plan: StepPlan, batch: InputBatch) -> StepOverlay | None:
        self._shown |= {new.seq_id: new.columns.get("picture", 0) for new in plan.new_sequences}
        of_tokens = np.repeat([self._shown.get(seq_id, 0) for seq_id in plan.seq_ids], batch.counts)
        rows = np.flatnonzero((of_tokens > 0) & np.isin(batch.positions, PLACES))
        if not len(rows):
            return None
        drawn = [torch.randn(2, len(PLACES), SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
        of, places = torch.tensor(of_tokens[rows]), torch.tensor(batch.positions[rows] - PLACES.start)
        embeddings, behind = torch.stack(drawn)[of, :, places].unbind(1)
        return StepOverlay(rows, embeddings, {0: behind})


def engine(path: Path, make: Callable[[EngineConfig], Any], graphs: str = "none", **options: Any) -> EngineCore:
    settings = {"max_num_seqs": 8, "num_blocks_override": 40, "block_size": 4, **options, "max_model_len": LONGEST}
    config = resolve(EngineOptions(model=str(path), **settings))
    if graphs != "none":
        config = replace(config, device=replace(config.device, cuda_graphs=graphs, cuda_graph_sizes=SIZES))
    return EngineCore(config, LocalExecutor(config, make(config), TABLE, Pictures()), SystemClock())


def requests() -> Sequence[AddRequest]:
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0}, {}, {"temperature": 1.0, "n": 2}]
    added = [request(number, PROMPTS[number][0], NUM_TOKENS, **kinds[number]) for number in range(4)]
    pictures = [{"picture": number} if number else {} for _, number in PROMPTS]
    return [
        AddRequest(msgspec.structs.replace(each.request, columns=columns))
        for each, columns in zip(added, pictures, strict=True)
    ]


@pytest.fixture(scope="module")
def expected(model_path: Path) -> dict[tuple[str, int], list[int]]:  # noqa: F811
    """Each request alone, its prompt at once."""
    found: dict[tuple[str, int], list[int]] = {}
    for message in requests():
        found |= run(engine(model_path, OnCpu, **CPU), [message])
    assert found["0", 0] != found["1", 0], "the pictures matter"
    return found


@pytest.mark.parametrize(("backend", "queue_depth"), [("torch", 1), ("native", 1), ("native", 2)])
def test_an_overlay_on_a_cpu(
    model_path: Path,  # noqa: F811
    expected: dict[tuple[str, int], list[int]],
    backend: str,
    queue_depth: int,
) -> None:
    """Prompts in chunks that end inside a picture, beside decodes; again with everything in the prefix cache."""
    options = {**CPU, "attention_backend": backend, "queue_depth": queue_depth}
    core = engine(model_path, OnCpu, max_num_batched_tokens=8, **options)
    assert run(core, requests()) == expected
    hits = core.stats().prefix_cache_hits_total
    assert run(core, requests()) == expected
    assert core.stats().prefix_cache_hits_total > hits, "of equal tokens and pictures"


def test_an_overlay_in_pieces_on_a_device(model_path: Path, expected: dict[tuple[str, int], list[int]]) -> None:  # noqa: F811
    core = engine(model_path, OnDevice, "full_and_piecewise", max_num_batched_tokens=8, **DEVICE)
    shown = requests()[1:3]
    assert run(core, shown) == {key: expected[key] for key in expected if key[0] in ("1", "2")}
    worker = core._executor._live_worker()  # type: ignore[attr-defined]
    captured = worker._runner._compute.passes._captured
    assert {each.overlaid for each in captured if each.kind == "piecewise"} == {None, (0,)}
