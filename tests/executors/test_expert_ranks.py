"""Ranks as processes that hold whole experts: the tokens and counts of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.clock import SystemClock
from quire.engine.core import EngineCore
from quire.executors.choice import make_executor
from tests.executors.test_multiprocess import configured, everything, run, sleep_and_wake
from tests.fakes.masks import AllowedByPosition
from tests.long import all_but_long
from tests.models.families import qwen2_moe
from tests.models.harness import randomize, save

LAYOUTS: dict[str, dict[str, Any]] = {
    "runs": {"tensor_parallel_size": 2},
    "in turns": {"tensor_parallel_size": 2, "expert_placement_strategy": "round_robin"},
    "two steps in flight": {"tensor_parallel_size": 2, "queue_depth": 2},
    "plain torch": {"tensor_parallel_size": 2, "attention_backend": "torch"},
    "stages": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven experts and a shared one in each of two layers."""
    return save(randomize(qwen2_moe(decoder_sparse_step=1, mlp_only_layers=[])), tmp_path_factory.mktemp("qwen2-moe"))


BALANCED: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 3, "window_size": 4, "step_interval": 6},
}
MOVING: dict[str, dict[str, Any]] = {
    "native": {},
    "two steps in flight": {"queue_depth": 2},
    "plain torch": {"attention_backend": "torch"},
    "stages": {"pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("layout", all_but_long(MOVING, ["native"]))
def test_experts_move_while_requests_run(model_path: Path, layout: str) -> None:
    """The tokens of one rank before, during and after; log-probabilities of an engine whose experts stay."""
    options = MOVING[layout]
    alone = make_core(model_path, **{name: value for name, value in options.items() if name == "attention_backend"})
    expected = run(alone)
    alone.shutdown()
    core = make_core(model_path, **BALANCED, **options)
    try:
        before = core._executor.expert_ranks()
        assert [[len(rank) for rank in layer] for layer in before] == [[5, 5], [5, 5]]
        assert run(core) == expected
        during = core._executor.expert_ranks()
        assert all(one != other for one, other in zip(before, during, strict=True)), "in both layers"
        moved = everything(core)
        if layout == "native":
            assert core._full_stats().expert_ranks == dict(enumerate(core._executor.expert_ranks()))
            sleep_and_wake(core)
            assert core._executor.expert_ranks() == before
            assert run(core) == expected
    finally:
        core.shutdown()
    stay = {"num_redundant_experts": 0, "step_interval": 10**6}
    core = make_core(model_path, **{**BALANCED, **options, "eplb_config": stay})
    try:
        assert everything(core) == moved
    finally:
        core.shutdown()


def make_core(path: Path, **options: Any) -> EngineCore:
    config = configured(path, expert_counts=True, **options)
    return EngineCore(config, make_executor(config), SystemClock(), masks=AllowedByPosition())


@pytest.mark.parametrize("layout", all_but_long(LAYOUTS, ["in turns"]))
def test_the_tokens_of_one_rank(model_path: Path, layout: str) -> None:
    """With prefix hits, preemption and an abort; rows are counted once for all ranks; bits depend on no schedule."""
    options = LAYOUTS[layout]
    alone = make_core(model_path, **{name: value for name, value in options.items() if name == "attention_backend"})
    expected, counts = run(alone), alone._executor.expert_counts()
    alone.shutdown()
    core = make_core(model_path, **options, enable_expert_parallel=True)
    try:
        assert run(core) == expected
        assert core.stats().preemptions_total > 0
        if layout not in ("two steps in flight", "stages"):  # whose plans are others
            assert core._executor.expert_counts() == counts
        preempted = everything(core)
    finally:
        core.shutdown()
    if layout == "runs":
        core = make_core(model_path, **options, enable_expert_parallel=True, num_blocks_override=300)
        try:
            assert everything(core) == preempted
        finally:
            core.shutdown()
