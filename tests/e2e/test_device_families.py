"""Families with layers of their own kinds, whole, on the device worker in Triton's interpreter: as on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM
from quire.config.options import EngineOptions
from quire.outputs import RequestOutput
from tests.e2e.conftest import exact
from tests.e2e.device_models import OPTIONS, greedy, run
from tests.models.conftest import SavedModel
from tests.models.harness import random_prompts

SavedModels = Callable[[str], SavedModel]
EAGER, GRAPHS = "quire.executors.local:LocalExecutor", "tests.fakes.graph_worker:GraphExecutor"
NUM_TOKENS = 4


def open_family(saved: SavedModel, executor: str = EAGER, **options: Any) -> LLM:
    keywords = {"model": str(saved.directory), **OPTIONS, "max_model_len": 128, **options}
    return LLM.from_options(EngineOptions.from_keywords(keywords), executor=executor)


def assert_close(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """The same greedy tokens, and nearly their log-probabilities."""
    for one, other in zip(found, expected, strict=True):
        tokens, values = ([output.outputs[0].token_ids, output.outputs[0].logprobs] for output in (one, other))
        assert tokens[0] == values[0]
        for token, left, right in zip(tokens[0], tokens[1], values[1], strict=True):
            assert left[token].logprob == pytest.approx(right[token].logprob, abs=5e-3)


@pytest.mark.long
def test_states_with_graphs_of_decodes_and_of_pieces(saved_model: SavedModels) -> None:
    """A prompt in chunks beside single tokens, over a border; the same bits without graphs and alone."""
    saved, prompts = saved_model("qwen3.5-small-states"), random_prompts([62, 3], 97)
    options: dict[str, Any] = {"state_snapshot_interval": 64, "block_size": 16, "max_num_batched_tokens": 20}
    params = greedy(NUM_TOKENS, logprobs=0)
    with open_family(saved, **options, attention_backend="torch") as llm:
        expected = run(llm, prompts, params)
    options |= {"batch_invariant": True, "enable_prefix_caching": False}
    found = {}
    for executor in (GRAPHS, EAGER):
        with open_family(saved, executor, **options) as llm:
            core = llm._client._core  # type: ignore[attr-defined]
            assert (sum(iter(core.idle, False)) > 0) == (executor == GRAPHS)
            found[executor] = run(llm, prompts, params)
            if executor == GRAPHS:
                found["alone"] = run(llm, prompts[1:], params)
                (capture,) = core._executor.platform.captures
                pieces = [graph for graph in capture.graphs if graph.num_replays]
                kernels = [{launch.kernel.__name__ for launch in graph.launches} for graph in pieces]
                assert any("_rule_kernel" in names for names in kernels), "a decode's graph has the states' kernels"
                assert any("_rule_kernel" not in names for names in kernels), "pieces end where states are read"
    assert_close(found[GRAPHS], expected)
    assert exact(found[GRAPHS]) == exact(found[EAGER])
    assert exact(found["alone"]) == exact(found[GRAPHS])[1:]


@pytest.mark.long
def test_sparse_latent_attention_with_graphs(saved_model: SavedModels) -> None:
    """Prompts and decodes of which some tokens see more keys than they read."""
    saved, prompts, params = saved_model("deepseek-v3.2"), random_prompts([25, 3], 97), greedy(NUM_TOKENS, logprobs=0)
    with open_family(saved, attention_backend="torch") as llm:
        expected = run(llm, prompts, params)
    with open_family(saved, GRAPHS, batch_invariant=True, enable_prefix_caching=False) as llm:
        core = llm._client._core  # type: ignore[attr-defined]
        assert sum(iter(core.idle, False)) > 0
        together = run(llm, prompts, params)
        alone = run(llm, prompts[:1], params)
        (capture,) = core._executor.platform.captures
        replayed = {
            launch.kernel.__name__ for graph in capture.graphs if graph.num_replays for launch in graph.launches
        }
    assert "_choose_kernel" in replayed
    assert_close(together, expected)
    assert exact(alone) == exact(together)[:1]
