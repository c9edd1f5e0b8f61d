"""Drafts where the device knows how many tokens a sequence has, and the host within bounds only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM
from quire.config.options import EngineOptions
from tests.e2e.conftest import exact
from tests.e2e.test_drafts import KINDS, NGRAM, PROMPTS
from tests.long import all_but_long
from tests.models.conftest import SavedModel

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "triton",
    "dtype": "float32",
    "max_model_len": 128,
    "num_blocks_override": 100,
    "max_num_seqs": 8,
    "block_size": 8,
    "skip_tokenizer_init": True,
}
FEW_BLOCKS = {len(KINDS): 34, 2: 14}
"""By how many kinds of requests run together: fewer blocks than they take."""
PLAIN = "tests.fakes.host_math:HostMathExecutor"


def run(directory: str, kinds: list[Any], executor: str = PLAIN, **options: Any) -> tuple[list[object], dict[str, Any]]:
    keywords = {"model": directory, **OPTIONS, **options}
    with LLM.from_options(EngineOptions.from_keywords(keywords), executor=executor) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS[: len(kinds)]]
        return exact(llm.generate(prompts, kinds, use_tqdm=False)), llm.stats()


@pytest.fixture(scope="module")
def directory(saved_model: Callable[[str], SavedModel]) -> str:
    return str(saved_model("llama").directory)


@pytest.fixture(scope="module", params=all_but_long(FEW_BLOCKS, [2]))
def kinds(request: pytest.FixtureRequest) -> list[Any]:
    return KINDS[: request.param]


@pytest.fixture(scope="module")
def expected(directory: str, kinds: list[Any]) -> list[object]:
    found, stats = run(directory, kinds)
    assert stats["draft_tokens_total"] == 0
    return found


@pytest.mark.parametrize("queue_depth", all_but_long([1, 2], [2]))
@pytest.mark.parametrize("preempts", all_but_long([False, True], [True]))
def test_equal_bits(directory: str, expected: list[object], kinds: list[Any], queue_depth: int, preempts: bool) -> None:
    options = {"num_blocks_override": FEW_BLOCKS[len(kinds)]} if preempts else {}
    found, stats = run(directory, kinds, speculative_config=NGRAM, queue_depth=queue_depth, **options)
    assert found == expected
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]
    assert (stats["preemptions_total"] > 0) == preempts
