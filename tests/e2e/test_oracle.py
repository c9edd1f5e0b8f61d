"""Drafts that replay a recorded run are accepted as often as asked for, and change no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM
from tests.e2e.conftest import GREEDY, exact
from tests.e2e.test_draft_model import drafting
from tests.e2e.test_drafts import NGRAM
from tests.long import all_but_long
from tests.models.conftest import SavedModel
from tests.models.harness import random_prompts

OPTIONS: dict[str, Any] = {"num_blocks_override": 12, "block_size": 16, "num_threads": 1, "skip_tokenizer_init": True}
"""Two sequences fit alone: they preempt one another."""


@pytest.mark.parametrize("method", all_but_long(["ngram", "draft_model"], ["draft_model"]))
def test_acceptance_is_chosen(method: str, saved_model: Callable[[str], SavedModel]) -> None:
    directory = str(saved_model("llama").directory)
    prompts, asked = random_prompts([30, 8], 97), msgspec.structs.replace(GREEDY, max_tokens=80)
    config = NGRAM if method == "ngram" else drafting(Path(directory))["speculative_config"]
    with LLM(directory, **OPTIONS) as llm:
        plain = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    given = [
        {"prompt_token_ids": ids, "prediction": list(output.outputs[0].token_ids)}
        for ids, output in zip(prompts, plain, strict=True)
    ]
    shares = []
    for rate in (0.0, 0.6, 1.0):
        drafts = {**config, "oracle": rate, "adaptive": False}
        with LLM(directory, speculative_config=drafts, **OPTIONS) as llm:
            assert exact(llm.generate(given, asked, use_tqdm=False)) == exact(plain)
            stats = llm.stats()
        assert stats["preemptions_total"] > 0
        shares.append(stats["accepted_draft_tokens_total"] / stats["draft_tokens_total"])
    assert shares[0] == 0
    assert 0.25 < shares[1] < 0.6
    assert shares[2] == 1
