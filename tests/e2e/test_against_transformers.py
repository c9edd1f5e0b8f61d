"""Greedy tokens and their logprobs equal those of Transformers, for every family, through the whole engine."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.e2e.conftest import GREEDY, generate
from tests.models.dense_families import DENSE_FAMILIES
from tests.models.families import FAMILIES
from tests.models.harness import random_prompts
from tests.models.hybrid_families import HYBRID_FAMILIES

PROMPT_LENGTHS = [1, 33, 7, 60]
NUM_GENERATED = 64
NUM_DENSE = 24
"""Of the dense families besides LLaMA's: their rotations do not stretch, and windows end before."""


@pytest.fixture(scope="module", autouse=True)
def products() -> None:
    """torch's own: what they give is compared within a tolerance."""


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_and_logprobs(name: str, saved_model) -> None:  # type: ignore[no-untyped-def]
    saved = saved_model(name)
    prompts = random_prompts(PROMPT_LENGTHS, 97, seed=11)
    tolerance = 5e-4 if name in HYBRID_FAMILIES else 1e-4
    num_generated = NUM_DENSE if name in DENSE_FAMILIES else NUM_GENERATED
    params = msgspec.structs.replace(GREEDY, max_tokens=num_generated)
    outputs, _ = generate(str(saved.directory), prompts, params, max_num_batched_tokens=48, max_num_seqs=8)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            expected = saved.reference.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=num_generated, pad_token_id=0
            )[0]
            logprobs = torch.log_softmax(saved.reference(expected[None]).logits[0].double(), dim=-1)
        completion = output.outputs[0]
        assert completion.token_ids == expected[len(prompt) :].tolist()
        assert completion.finish_reason == "length"
        for index, (token, alternatives) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            row = logprobs[len(prompt) - 1 + index]
            assert alternatives[token].logprob == pytest.approx(float(row[token]), abs=tolerance)
            best = row.topk(3).values.tolist()
            assert sorted((entry.logprob for entry in alternatives.values()), reverse=True)[:3] == pytest.approx(
                best, abs=tolerance
            )
