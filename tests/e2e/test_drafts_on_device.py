"""Drafts where the device knows how many tokens a sequence has, and the host within bounds only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    "state_snapshot_interval": 64,
}
PLAIN = "tests.fakes.host_math:HostMathExecutor"


def run(
    directory: str,
    kinds: list[Any],
    executor: str = PLAIN,
    prompts: Sequence[list[int]] = PROMPTS,
    **options: Any,
) -> tuple[list[object], dict[str, Any]]:
    keywords = {"model": directory, **OPTIONS, **options}
    with LLM.from_options(EngineOptions.from_keywords(keywords), executor=executor) as llm:
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], kinds, use_tqdm=False)
        return exact(found), llm.stats()


@pytest.fixture(scope="module")
def directory(saved_model: Callable[[str], SavedModel]) -> str:
    return str(saved_model("llama").directory)


@pytest.fixture(scope="module")
def expected(directory: str) -> list[object]:
    found, stats = run(directory, KINDS)
    assert stats["draft_tokens_total"] == 0
    return found


@pytest.mark.parametrize("queue_depth", all_but_long([1, 2], [2]))
@pytest.mark.parametrize("num_blocks", all_but_long([100, 34], [34]))
def test_equal_bits(directory: str, expected: list[object], queue_depth: int, num_blocks: int) -> None:
    """With few blocks requests are preempted."""
    options = {"queue_depth": queue_depth, "num_blocks_override": num_blocks}
    found, stats = run(directory, KINDS, speculative_config=NGRAM, **options)
    assert found == expected
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]
    assert (stats["preemptions_total"] > 0) == (num_blocks < 100)


OTHERS = {"qwen3-window": 14, "deepseek-v3.2": 14, "qwen3.5-small-states": 12}
"""Families whose layers attend over windows, over latents that are chosen among, and keep states; with so few blocks
that requests are preempted."""
ACROSS = [PROMPTS[2], PROMPTS[1]]
"""One crosses the border of 64 tokens with its drafts."""


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("queue_depth", [1, 2])
def test_other_layers(name: str, queue_depth: int, saved_model: Callable[[str], SavedModel]) -> None:
    directory = str(saved_model(name).directory)
    expected, _ = run(directory, KINDS[:2], prompts=ACROSS)
    for num_blocks in (100, OTHERS[name]):
        options = {"queue_depth": queue_depth, "num_blocks_override": num_blocks}
        found, stats = run(directory, KINDS[:2], prompts=ACROSS, speculative_config=NGRAM, **options)
        assert found == expected
        assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]
        assert (stats["preemptions_total"] > 0) == (num_blocks < 100)
