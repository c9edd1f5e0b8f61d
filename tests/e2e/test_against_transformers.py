"""Greedy tokens and their logprobs equal those of Transformers, for every family, through the whole engine."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.e2e.conftest import GREEDY, generate
from tests.long import all_but_long
from tests.models.dense_families import DENSE_FAMILIES, DENSE_SAMPLE
from tests.models.families import FAMILIES
from tests.models.harness import next_logits, random_prompts

PROMPT_LENGTHS = [1, 33, 7, 60]
NUM_GENERATED = 64
NUM_DENSE = 24
"""Of the dense families besides LLaMA's: their rotations do not stretch, and windows end before."""
REPRESENTATIVES = [
    *(
        "gpt2",
        "opt",
        "opt-bare",
        "deepseek-v2",
        "deepseek-v3",
        "deepseek-v3-yarn",
        "deepseek-v3.2",
        "llama",
        "llama-biases",
    ),
    *("llama-dynamic", "llama-yarn-mscale", "llama-llama3", "mistral", "qwen2-window", "qwen3"),
    *(
        "mixtral-one-expert",
        "qwen2-moe-renormalised",
        "qwen3-moe-window",
        "llama4-interleaved",
        "gpt-oss",
        "qwen3-next",
        "qwen3.5-moe",
    ),
    *("qwen3.5-two-of-two", *DENSE_SAMPLE),
]
"""Each kind of layer, norm, rotation and window once. The logits of all are compared in tests/models."""

# Both sides round, each in an order that the processor chooses: up to 1.7e-4 of a log-probability were seen.
TOLERANCE = 5e-4


@pytest.fixture(scope="module", autouse=True)
def products() -> None:
    """torch's own: what they give is compared within a tolerance."""


@pytest.mark.parametrize("name", all_but_long(FAMILIES, REPRESENTATIVES))
def test_greedy_tokens_and_logprobs(name: str, saved_model) -> None:  # type: ignore[no-untyped-def]
    saved = saved_model(name)
    prompts = random_prompts(PROMPT_LENGTHS, 97, seed=11)
    num_generated = NUM_DENSE if name in DENSE_FAMILIES else NUM_GENERATED
    params = msgspec.structs.replace(GREEDY, max_tokens=num_generated)
    outputs, _ = generate(str(saved.directory), prompts, params, max_num_batched_tokens=48, max_num_seqs=8)
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", num_generated)
        logprobs = torch.log_softmax(next_logits(saved.reference, prompt, completion.token_ids).double(), dim=-1)
        assert completion.token_ids == logprobs.argmax(-1).tolist()
        for token, alternatives, row in zip(completion.token_ids, completion.logprobs, logprobs, strict=True):
            assert alternatives[token].logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
            best = row.topk(3).values.tolist()
            assert sorted((entry.logprob for entry in alternatives.values()), reverse=True)[:3] == pytest.approx(
                best, abs=TOLERANCE
            )
