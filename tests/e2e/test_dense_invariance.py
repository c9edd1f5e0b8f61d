"""Gemma's and OLMo's layers, and mixtures of experts, in the engine: the same bits whatever else happens to a request,
on every back end."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from quire import SamplingParams
from tests.e2e.conftest import GREEDY, Variant, exact, generate
from tests.e2e.device_models import OPTIONS, continuation, greedy, open_engine, run
from tests.long import one_in
from tests.models.harness import random_prompts

VARIANTS = [
    Variant("gemma2"),
    Variant("gemma3", {"dtype": "bfloat16"}),
    Variant("olmo3", {"kv_cache_dtype": "int8"}),
    Variant("glm4-biases", {"attention_backend": "torch"}),
    Variant("gpt-oss", {"num_threads": 2}),
    Variant("llama4", {"kv_cache_dtype": "bfloat16"}),
    Variant("qwen2-moe", {"attention_backend": "torch"}),
    Variant("qwen3-moe", {"quantization": "w8a8"}),
]
FEW_BLOCKS = {"glm": 12, "qwen": 12, "llama4": 16}
"""By how many groups of blocks a family has, and how soon they give blocks back; others: 20."""
PROMPTS = random_prompts([37, 1, 22, 16, 30, 5], 97, seed=3)
SHORT = msgspec.structs.replace(GREEDY, max_tokens=12)
FORKS = SamplingParams(temperature=50.0, n=3, seed=5, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=0)
BEAMS = SamplingParams(
    use_beam_search=True, n=2, best_of=3, max_tokens=8, ignore_eos=True, detokenize=False, temperature=0.0
)


@pytest.fixture(scope="module", params=one_in(2, VARIANTS), ids=str)
def model(request, saved_model) -> Variant:  # type: ignore[no-untyped-def]
    variant: Variant = request.param
    return replace(variant, directory=str(saved_model(variant.family).directory))


@pytest.fixture(scope="module")
def together(model: Variant) -> list[object]:
    outputs, _ = generate(model, PROMPTS, SHORT)
    return exact(outputs)


@pytest.mark.parametrize("options", [{"max_num_seqs": 1}, {"max_prefill_chunk": 7, "block_size": 32, "queue_depth": 2}])
def test_alone_in_chunks_and_in_other_blocks(model: Variant, together: list[object], options: dict[str, int]) -> None:
    outputs, _ = generate(model, PROMPTS, SHORT, **options)
    assert exact(outputs) == together


def test_preempted(model: Variant, together: list[object]) -> None:
    num_blocks = next((count for name, count in FEW_BLOCKS.items() if model.family.startswith(name)), 20)
    outputs, stats = generate(model, PROMPTS, SHORT, num_blocks_override=num_blocks, enable_prefix_caching=False)
    assert stats["preemptions_total"] > 0
    assert exact(outputs) == together


def test_prefix_hits(model: Variant, together: list[object]) -> None:
    prompts = [PROMPTS[0], [*PROMPTS[0][:-1], 5], PROMPTS[0]]
    outputs, stats = generate(model, prompts, SHORT, max_num_seqs=1)
    assert stats["prefix_cache_hits_total"] == 2 * 32
    assert [exact(outputs)[index] for index in (0, 2)] == [together[0], together[0]]


def test_samples_and_beams(model: Variant) -> None:
    params = [FORKS, BEAMS]
    outputs, _ = generate(model, PROMPTS[2:4], params)
    chunked, _ = generate(model, PROMPTS[2:4], params, max_prefill_chunk=5)
    assert exact(outputs) == exact(chunked)
    assert len({tuple(completion.token_ids) for completion in outputs[0].outputs}) == 3


def test_the_device_engine(saved_model) -> None:  # type: ignore[no-untyped-def]
    """Triton's kernels: tokens of Transformers, and the bits of a request alone."""
    saved, prompts = saved_model("gemma3-all-sliding"), random_prompts([3, 11], 97, seed=4)
    with open_engine(saved.directory, batch_invariant=True, enable_prefix_caching=False) as llm:
        outputs = run(llm, prompts, greedy(3, logprobs=0))
        alone = run(llm, prompts[1:], greedy(3, logprobs=0))
    assert OPTIONS["attention_backend"] == "triton"
    assert [output.outputs[0].token_ids for output in outputs] == [
        continuation(saved.reference, prompt, 3) for prompt in prompts
    ]
    assert exact(alone) == exact(outputs[1:])
