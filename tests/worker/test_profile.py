"""The profiling pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec, SlidingWindowSpec
from quire.layers.batch import ForwardBatch
from quire.worker.input_batch import InputBatch
from quire.worker.memory_profile import estimate_activations
from quire.worker.platform import cpu_meter
from quire.worker.platform.cpu import CpuPlatform
from quire.worker.platform.cpu_meter import PROFILED_ROWS, PROFILED_TOKENS, dummy_inputs
from quire.worker.worker import Worker
from tests.long import one_in


def loaded_worker(model_path: Path, **options: object) -> Worker:
    config = resolve(EngineOptions.from_keywords({"model": str(model_path), "num_threads": 1, **options}))
    worker = Worker(config, CpuPlatform(config))
    worker.load_model()
    return worker


def count_forwards(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(tokens, sampled rows) of every step from here on."""
    model, steps = worker._model, []
    assert model is not None
    forward, compute_logits = model.forward, model.compute_logits

    def spy_forward(batch: ForwardBatch) -> torch.Tensor:
        steps.append((len(batch.token_ids), 0))
        return forward(batch)

    def spy_logits(hidden: torch.Tensor) -> torch.Tensor:
        steps[-1] = (steps[-1][0], len(hidden))
        return compute_logits(hidden)

    monkeypatch.setattr(model, "forward", spy_forward)
    monkeypatch.setattr(model, "compute_logits", spy_logits)
    return steps


@pytest.mark.parametrize(
    ("budget", "profiled"),
    one_in(3, [(50, 50), (PROFILED_TOKENS, PROFILED_TOKENS), (5000, PROFILED_TOKENS)]),
)
def test_one_step_of_bounded_length(
    budget: int, profiled: int, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = loaded_worker(model_path)
    steps = count_forwards(worker, monkeypatch)
    worker.profile(budget, 12)
    assert steps == [(profiled, 12)]


def test_a_step_is_scaled_to_the_budget_and_its_sequences(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = loaded_worker(model_path)
    peaks = iter([1000, 7] * 4)

    def measure(work: Callable[[], object]) -> int:
        work()
        return next(peaks)

    monkeypatch.setattr("quire.worker.platform.cpu_meter.measure_peak", measure)
    assert worker.profile(PROFILED_TOKENS, 4).activations == 1000 + 7
    assert worker.profile(4 * PROFILED_TOKENS, 4).activations == 4 * 1000 + 7
    assert worker.profile(4 * PROFILED_TOKENS + 1, PROFILED_ROWS).activations == 5 * 1000 + 7
    assert worker.profile(PROFILED_TOKENS, PROFILED_ROWS + 1).activations == 1000 + 2 * 7


def test_what_is_measured(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = loaded_worker(model_path)
    steps = count_forwards(worker, monkeypatch)
    found = worker.profile(600, 32)
    assert steps == [(PROFILED_TOKENS, PROFILED_ROWS)]
    assert found.available > 0
    assert found.activations < 2**30
    num_parameters = 3 * (48 * (48 * 2 + 16 * 2) + 3 * 48 * 100 + 2 * 48) + 48 + 2 * 97 * 48
    assert found.weights == 4 * num_parameters


def test_estimated_where_it_cannot_be_measured(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unmeasured(work: object) -> None:
        work()

    monkeypatch.setattr(cpu_meter, "measure_peak", unmeasured)
    worker = loaded_worker(model_path)
    config = worker._config.model
    assert worker.profile(100, 4).activations == estimate_activations(config, 100, 4)
    per_token = 4 * (6 * 48 + 3 * 100 + 3 * (6 + 2 * 2) * 8)
    assert estimate_activations(config, 101, 4) - estimate_activations(config, 100, 4) == per_token
    assert estimate_activations(config, 100, 5) - estimate_activations(config, 100, 4) == 4 * 5 * 97


def test_the_dummy_batch_fills_the_budget_with_long_sequences() -> None:
    groups, layers_per_group = group_layers([AttentionSpec(1, 4, 4, 4), SlidingWindowSpec(1, 4, 4, 4, window=8)], 4)
    layout = KVCacheLayout(4, 1 + 3, groups, layers_per_group)
    token_ids, batch = dummy_inputs(InputBatch.dummy_prompts(25, 10), layout)
    assert token_ids.tolist() == [0] * 25
    assert batch.query_start.tolist() == [0, 10, 20, 25]
    assert batch.slot_positions.tolist() == [*range(10), *range(10), *range(5)]
    assert batch.start_positions.tolist() == [0, 0, 0]
    assert len(batch.block_tables) == len(batch.slot_mapping) == 2
    assert batch.block_tables[0].tolist() == [[1, 2, 3]] * 3
    assert max(batch.slot_mapping[0].tolist()) < layout.num_blocks * 4


def test_a_budget_that_is_a_multiple_of_the_context() -> None:
    groups, layers_per_group = group_layers([AttentionSpec(1, 4, 4, 4)], 4)
    _, batch = dummy_inputs(InputBatch.dummy_prompts(20, 10), KVCacheLayout(4, 6, groups, layers_per_group))
    assert batch.query_start.tolist() == [0, 10, 20]
