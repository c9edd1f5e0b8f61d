"""batch_invariant=True: all tokens and logprobs bit by bit, whatever else runs and however a request is cut up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.outputs import RequestOutput
from tests.gpu.conftest import complete, generate, greedy, open_engine, with_graphs
from tests.models.conftest import SavedModel
from tests.models.harness import random_prompts

pytestmark = pytest.mark.gpu

SavedModels = Callable[[str], SavedModel]
ON_CARD = torch.cuda.is_available()
LENGTHS = [5, 33, 100, 64, 1, 18] if ON_CARD else [5, 12]
PARAMS = greedy(40 if ON_CARD else 3, logprobs=3)


def exact(output: RequestOutput) -> list[object]:
    (completion,) = output.outputs
    assert completion.logprobs is not None
    return [
        completion.token_ids,
        [[(token, entry.logprob, entry.rank) for token, entry in each.items()] for each in completion.logprobs],
    ]


@pytest.fixture(scope="module", params=["bfloat16", "float32"] if ON_CARD else ["float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["llama-biases", "qwen3-window"] if ON_CARD else ["qwen3-window"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(family: str, dtype: str, saved_model: SavedModels) -> list[list[object]]:
    """Every prompt by itself, in one engine without a prefix cache."""
    prompts = random_prompts(LENGTHS, 97)
    options = {"dtype": dtype, "batch_invariant": True, "enable_prefix_caching": False}
    with open_engine(saved_model(family).directory, **options) as llm:
        return [exact(complete(llm, [prompt], PARAMS)[0]) for prompt in prompts]


@pytest.mark.parametrize(
    "options",
    [
        {},
        # Without a card that is what {} does.
        pytest.param({"enforce_eager": True}, marks=pytest.mark.gpu(interpretable=False)),
        with_graphs("piecewise"),
        {"max_num_batched_tokens": 16},
        {"num_blocks_override": 28},
        {"num_blocks_override": 28, "preemption_mode": "swap", "swap_space": "64MiB"},
        {"queue_depth": 1},
    ],
    ids=str,
)
def test_together_is_like_alone(
    options: dict[str, Any], family: str, dtype: str, alone: list[list[object]], saved_model: SavedModels
) -> None:
    prompts = random_prompts(LENGTHS, 97)
    options = {"dtype": dtype, "batch_invariant": True, **options}
    outputs = generate(saved_model(family).directory, prompts, PARAMS, **options)
    assert [exact(output) for output in outputs] == alone


def test_a_cached_prefix_is_like_a_computed_one(
    family: str, dtype: str, alone: list[list[object]], saved_model: SavedModels
) -> None:
    prompts = random_prompts(LENGTHS, 97)
    with open_engine(saved_model(family).directory, dtype=dtype, batch_invariant=True) as llm:
        complete(llm, prompts, greedy(1))
        outputs = complete(llm, prompts, PARAMS)
        assert not ON_CARD or any(output.num_cached_tokens for output in outputs)
    assert [exact(output) for output in outputs] == alone
