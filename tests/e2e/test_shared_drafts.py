"""Drafts from outputs of earlier requests: the same tokens, and no text of one cache salt drafts for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.e2e.conftest import exact
from tests.long import all_but_long
from tests.models.conftest import SavedModel

SUFFIX = {"method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_max_spec_factor": 2.0}
OPTIONS: dict[str, Any] = {"num_blocks_override": 60, "num_threads": 1, "skip_tokenizer_init": True}
RANDOM = SamplingParams(temperature=100.0, seed=7, max_tokens=40, ignore_eos=True, logprobs=1, detokenize=False)
"""So hot that no text repeats itself by much."""


@pytest.mark.parametrize("backend", all_but_long(["native", "torch"], ["native"]))
def test_outputs_draft_for_their_own_scope(backend: str, saved_model: Callable[[str], SavedModel]) -> None:
    directory = str(saved_model("llama").directory)
    with LLM(directory, speculative_config=SUFFIX, attention_backend=backend, **OPTIONS) as llm:

        def run(salt: str) -> tuple[object, int]:
            """The tokens that are generated, and the drafts that were accepted meanwhile."""
            before = llm.stats()["accepted_draft_tokens_total"]
            found = llm.generate({"prompt_token_ids": [5, 6, 7], "cache_salt": salt}, RANDOM, use_tqdm=False)
            return exact(found), llm.stats()["accepted_draft_tokens_total"] - before

        text, own = run("")
        assert own < 5
        assert run("a") == (text, own)
        again, accepted = run("a")
        assert again == text
        assert accepted > 25
        assert run("b") == (text, own)
