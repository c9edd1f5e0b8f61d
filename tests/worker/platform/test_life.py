"""The life of a device worker inside an engine: swapping, the disk tier, sleep, and CUDA graphs (recorded)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM
from quire.config.options import EngineOptions
from quire.errors import EngineAsleepError
from tests.e2e.conftest import GREEDY, exact
from tests.models.conftest import SavedModel, saved_model
from tests.models.harness import random_prompts

__all__ = ["saved_model"]

PROMPTS = [{"prompt_token_ids": ids} for ids in random_prompts([17, 15], 97, seed=8)]
SHORT = msgspec.structs.replace(GREEDY, max_tokens=5, logprobs=None)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "triton",
    "dtype": "float32",
    "max_model_len": 64,
    "num_blocks_override": 64,
    "max_num_seqs": 4,
    "block_size": 4,
    "skip_tokenizer_init": True,
}
PLAIN = "tests.fakes.host_math:HostMathExecutor"


def engine(model_path: Path, executor: str = PLAIN, **options: Any) -> LLM:
    keywords = {"model": str(model_path), **OPTIONS, **options}
    return LLM.from_options(EngineOptions.from_keywords(keywords), executor=executor)


def outputs(llm: LLM, prompts: list[dict[str, list[int]]] = PROMPTS) -> list[object]:
    return exact(llm.generate(prompts, SHORT, use_tqdm=False))


@pytest.fixture(scope="module")
def expected(model_path: Path) -> list[object]:
    """The plain CPU back end's, bit by bit."""
    with LLM(str(model_path), **{**OPTIONS, "attention_backend": "torch"}) as llm:
        return outputs(llm)


def test_swapped_requests_go_on_as_if_nothing_had_happened(model_path: Path, expected: list[object]) -> None:
    with engine(model_path, num_blocks_override=9, preemption_mode="swap", swap_space="1MiB") as llm:
        assert outputs(llm) == expected
        assert llm.stats()["swapped_out_blocks_total"] > 0
        assert llm.stats()["swapped_in_blocks_total"] > 0


@pytest.mark.long
def test_sleep_and_the_disk_tier(model_path: Path, expected: list[object], tmp_path: Path) -> None:
    """Weights come from the host, or are loaded again; blocks on disk outlive the engine."""
    disk = {"kv_offload_dir": tmp_path, "kv_offload_size": "16MiB", "swap_space": "1MiB"}
    with engine(model_path, **disk) as llm:
        assert outputs(llm) == expected
        for level in (1, 2):
            llm.sleep(level)
            with pytest.raises(EngineAsleepError):
                outputs(llm)
            llm.wake_up()
            assert outputs(llm) == expected
    with engine(model_path, **disk) as llm:
        assert outputs(llm) == expected
        assert llm.stats()["disk_cache_hit_blocks_total"] > 0


def test_without_a_given_size_the_pool_is_profiled(model_path: Path) -> None:
    with engine(model_path, num_blocks_override=None, gpu_memory_utilization=0.05) as llm:
        assert llm.ready.num_blocks == 4 * 16, "all that four sequences of 64 tokens can use"


def graph_engine(model_path: Path, **options: Any) -> tuple[LLM, Callable[[], int]]:
    """An engine with recorded graphs, and what captures all of them, as an idle engine process does: how many."""
    llm = engine(model_path, "tests.fakes.graph_worker:GraphExecutor", **options)
    core = llm._client._core  # type: ignore[attr-defined]
    return llm, lambda: sum(iter(core.idle, False))


def test_graphs_that_were_captured_while_idle_hold_every_kernel(model_path: Path, expected: list[object]) -> None:
    """A batch of padding is what they are captured over; the longest sequence is long enough for splits, whose merging
    then must not be missing."""
    llm, capture_all = graph_engine(model_path, max_model_len=256)
    with llm:
        assert capture_all() > 0
        assert outputs(llm, PROMPTS) == expected
        (capture,) = llm._client._core._executor.platform.captures  # type: ignore[attr-defined]
        replayed = [graph for graph in capture.graphs if graph.num_replays]
        kernels = [{launch.kernel.__name__ for launch in graph.launches} for graph in replayed]
        assert any("_merge_kernel" in names for names in kernels)


@pytest.mark.long
def test_graphs_where_hidden_states_leave_in_another_size(saved_model: Callable[[str], SavedModel]) -> None:
    """OPT-350m projects them to its embeddings' size."""
    directory = saved_model("opt-350m").directory
    with engine(directory, attention_backend="torch") as llm:
        plain = outputs(llm)
    llm, capture_all = graph_engine(directory)
    with llm:
        capture_all()
        assert outputs(llm) == plain


@pytest.mark.long
def test_graphs_change_no_token(model_path: Path) -> None:
    """Triton's kernels, interpreted: eager, as graphs captured on first use, and as graphs captured when idle."""
    prompts, params = (
        [{"prompt_token_ids": ids} for ids in ([5, 6, 7], [8, 9])],
        msgspec.structs.replace(SHORT, max_tokens=3),
    )
    options = {"batch_invariant": True, "max_num_batched_tokens": 8}
    found = []
    for executor in ("quire.executors.local:LocalExecutor", "tests.fakes.graph_worker:GraphExecutor"):
        with engine(model_path, executor, **options) as llm:
            found.append(exact(llm.generate(prompts, params, use_tqdm=False)))
            core = llm._client._core  # type: ignore[attr-defined]
            num_captures = 0
            while core.idle():
                num_captures += 1
            assert core.idle() is False
            if "Graph" in executor:
                found.append(exact(llm.generate(prompts, params, use_tqdm=False)))
                (capture,) = core._executor.platform.captures
                assert sum(graph.num_replays for graph in capture.graphs) > 0
                llm.sleep(1)
                llm.wake_up()
                found.append(exact(llm.generate(prompts, params, use_tqdm=False)))
            else:
                assert num_captures == 0
    assert all(each == found[0] for each in found)
