"""The same tokens and logprobs, bit by bit, whatever else happens to a request (DESIGN rule 11)."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from quire import SamplingParams
from quire.kernels.cpu import _native
from quire.outputs import RequestOutput
from tests.e2e.conftest import GREEDY, Variant, exact
from tests.e2e.conftest import generate as generate_with
from tests.long import all_but_long, one_in
from tests.models.harness import random_prompts

BF16_ISA = "auto" if _native.has_bf16_products("auto") else "bf16_emulated"
PATHS = [
    Variant("llama"),
    Variant("qwen3-window"),
    Variant("llama-wide", {"attention_backend": "torch"}),
    Variant("llama-wide", {"dtype": "bfloat16", "matmul_precision": "bfloat16"}, isa=BF16_ISA),
    Variant("llama-wide", {"quantization": "int8", "kv_cache_dtype": "int8"}),
    Variant("deepseek-v3.2"),
]
"""Every type of KV cache, with and without windows, of latents, native and plain: ways through the engine are tested
with these."""
VARIANTS = [
    *PATHS,
    Variant("gpt2"),  # heads of 12: plain operators
    Variant("deepseek-v3-yarn"),
    Variant("deepseek-v3.2", {"attention_backend": "torch"}),
    Variant("deepseek-v3.2-yarn", {"dtype": "bfloat16"}),
    Variant("deepseek-v2", {"dtype": "bfloat16", "matmul_precision": "bfloat16"}, isa=BF16_ISA),
    Variant("llama-wide", {"dtype": "bfloat16"}),
    Variant("qwen3-window", {"dtype": "bfloat16", "matmul_precision": "bfloat16"}, isa="bf16_emulated"),
    Variant(
        "llama-wide",
        {"quantization": "w8a8", "kv_cache_dtype": "bfloat16", "matmul_precision": "bfloat16"},
        isa=BF16_ISA,
    ),
    Variant("qwen3-window", {"kv_cache_dtype": "bfloat16", "matmul_precision": "bfloat16"}, isa=BF16_ISA),
    Variant("llama-wide", {"quantization": "w8a8"}),
    Variant("llama-wide", {"quantization": "int4", "kv_cache_dtype": "bfloat16"}),
    Variant("qwen3-window", {"dtype": "float16", "kv_cache_dtype": "int8"}),
    Variant("llama-wide", {"quantization": "w8a8", "kv_cache_dtype": "int8"}, isa="avx2"),
    Variant("llama-wide", {"quantization": "int4"}, isa="portable"),
    Variant("llama-wide", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    Variant("qwen3-window", {"quantization": "mxfp4", "kv_cache_dtype": "fp8"}, isa="avx2"),
]
"""All arithmetic: what kernels see of a step's shape is tested with these."""
OFTEN = [*PATHS, *(each for each in VARIANTS[len(PATHS) :: 2] if str(each) != "deepseek-v3.2-torch")]
GROUPS = Variant("deepseek-v2-groups", {"attention_backend": "torch"})
"""Slow, and like a variant above but for the choice of experts."""
on_paths = pytest.mark.parametrize("model", PATHS, ids=str, indirect=True, scope="module")
PROMPTS = random_prompts([1 + (7 * i) % 61 for i in range(32)], 97, seed=3)
ALONE = [0, 3, 6, 26]
"""Prompts that also run alone: of 1, 22, 43 and 61 tokens."""
SHORT = msgspec.structs.replace(GREEDY, max_tokens=14)
SAMPLED = [
    SamplingParams(
        temperature=0.9, top_p=0.9, top_k=20, seed=i, max_tokens=14, logprobs=2, ignore_eos=True, detokenize=False
    )
    for i in range(32)
]


def generate(  # type: ignore[no-untyped-def]
    model: Variant, prompts: list[list[int]], params: SamplingParams | list[SamplingParams] = SHORT, **options
) -> tuple[list[RequestOutput], dict[str, object]]:
    return generate_with(model, prompts, params, **options)


@pytest.fixture(
    scope="module",
    params=all_but_long([*VARIANTS, GROUPS], OFTEN),
    ids=str,
)
def model(request, saved_model) -> Variant:  # type: ignore[no-untyped-def]
    variant: Variant = request.param
    return replace(variant, directory=str(saved_model(variant.family).directory))


@pytest.fixture(scope="module")
def together(model: Variant) -> list[tuple[list[int], list[object]]]:
    """All 32 prompts in one batch: what the other runs are compared with."""
    outputs, stats = generate(model, PROMPTS)
    assert stats["preemptions_total"] == 0
    return exact(outputs)


FORKED = PROMPTS[4:9]
FORKS = SamplingParams(temperature=5.0, n=4, seed=5, max_tokens=20, ignore_eos=True, detokenize=False, logprobs=0)


@pytest.fixture(scope="module")
def forked(model: Variant) -> list[object]:
    """Four completions of each of five prompts, in one batch."""
    outputs, stats = generate(model, FORKED, FORKS)
    assert stats["preemptions_total"] == 0
    return exact(outputs)


def test_alone_or_in_a_batch_of_32(model: Variant, together: list[object]) -> None:
    outputs, _ = generate(model, [PROMPTS[index] for index in ALONE], max_num_seqs=1)
    assert exact(outputs) == [together[index] for index in ALONE]


def test_chunks_and_smaller_blocks(model: Variant, together: list[object]) -> None:
    outputs, _ = generate(model, PROMPTS, max_prefill_chunk=7, block_size=8)
    assert exact(outputs) == together


@on_paths
def test_a_small_token_budget(model: Variant, together: list[object]) -> None:
    outputs, _ = generate(model, PROMPTS, max_num_batched_tokens=33, max_num_seqs=32)
    assert exact(outputs) == together


@on_paths
def test_larger_blocks(model: Variant, together: list[object]) -> None:
    outputs, _ = generate(model, PROMPTS, block_size=32)
    assert exact(outputs) == together


@on_paths
def test_queue_depth_two(model: Variant, together: list[object]) -> None:
    outputs, _ = generate(model, PROMPTS, queue_depth=2)
    assert exact(outputs) == together


@on_paths
@pytest.mark.parametrize("queue_depth", all_but_long([1, 2], [2]))
def test_preemption(model: Variant, together: list[object], queue_depth: int) -> None:
    outputs, stats = generate(
        model, PROMPTS, num_blocks_override=45, enable_prefix_caching=False, queue_depth=queue_depth
    )
    assert stats["preemptions_total"] > 0
    assert exact(outputs) == together


@on_paths
@pytest.mark.parametrize("options", one_in(2, [{"queue_depth": 2, "enable_prefix_caching": False}, {}]))
def test_swapping(model: Variant, together: list[object], options: dict[str, int]) -> None:
    outputs, stats = generate(
        model, PROMPTS, num_blocks_override=45, preemption_mode="swap", swap_space="16MiB", **options
    )
    assert stats["preemptions_total"] == stats["swap_preemptions_total"] > 0
    assert stats["swapped_in_blocks_total"] > 0
    assert stats["recomputed_tokens_total"] == stats["num_used_host_blocks"] == 0
    assert exact(outputs) == together


def test_prefix_hits(model: Variant) -> None:
    shared = PROMPTS[8][:1] * 5 + [i % 97 for i in range(1, 75)]
    prompts = [[*shared, last] for last in range(1, 4)]
    missed, stats = generate(model, prompts, enable_prefix_caching=False)
    assert stats["prefix_cache_hits_total"] == 0
    hit, stats = generate(model, prompts, max_num_seqs=1)
    assert stats["prefix_cache_hits_total"] == 2 * 64
    assert [output.num_cached_tokens for output in hit] == [0, 64, 64]
    assert exact(hit) == exact(missed)


@on_paths
def test_prefixes_computed_once_for_requests_that_arrive_together(model: Variant) -> None:
    shared = [i % 97 for i in range(5, 79)]
    prompts = [[*shared, last] for last in range(1, 9)]
    each, stats = generate(model, prompts, enable_prefix_caching=False)
    assert stats["prefix_cache_waits_total"] == 0
    for options in ({}, {"queue_depth": 2, "max_prefill_chunk": 24}):
        outputs, stats = generate(model, prompts, **options)
        assert stats["prefix_cache_waits_total"] == 7
        assert [output.num_cached_tokens for output in outputs] == [0] + [64] * 7
        assert exact(outputs) == exact(each)


@on_paths
def test_sampled_tokens_depend_on_the_seed_alone(model: Variant) -> None:
    outputs, _ = generate(model, PROMPTS, SAMPLED)
    prompts, params = [PROMPTS[index] for index in ALONE], [SAMPLED[index] for index in ALONE]
    alone, _ = generate(model, prompts, params, max_num_seqs=1, max_prefill_chunk=5)
    together = exact(outputs)
    assert exact(alone) == [together[index] for index in ALONE]
    assert len({str(each) for each in together}) == 32


@on_paths
@pytest.mark.parametrize(
    "options",
    all_but_long(
        [
            {"max_prefill_chunk": 7, "enable_prefix_caching": False},
            {"queue_depth": 2},
            {"preemption_mode": "swap", "swap_space": "16MiB", "queue_depth": 2, "max_prefill_chunk": 7},
        ],
        [{"queue_depth": 2}],
    ),
)
def test_parallel_samples(model: Variant, forked: list[object], options: dict[str, int]) -> None:
    """The n completions are the same with sharing, chunked and planned ahead, with and without preemption."""
    outputs, _ = generate(model, FORKED, FORKS, **options)
    assert exact(outputs) == forked
    # Room for the largest request alone: 11 blocks of a group. Two groups in the model with windows.
    tight = 48 if "window" in model.family else 24
    outputs, stats = generate(model, FORKED, FORKS, num_blocks_override=tight, **options)
    assert stats["preemptions_total"] > 0
    assert stats["swap_preemptions_total"] == (stats["preemptions_total"] if "swap_space" in options else 0)
    assert exact(outputs) == forked
    assert len({tuple(completion.token_ids) for completion in outputs[3].outputs}) == 4


def test_prompt_logprobs_in_chunks_and_whole(model: Variant) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2, detokenize=False)
    whole, _ = generate(model, PROMPTS[3:6], params)
    chunked, _ = generate(model, PROMPTS[3:6], params, max_prefill_chunk=7)
    assert [output.prompt_logprobs for output in whole] == [output.prompt_logprobs for output in chunked]
    for prompt, output in zip(PROMPTS[3:6], whole, strict=True):
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        assert all(token in entry for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True))


@pytest.mark.parametrize(
    "model",
    [pytest.param(each, marks=() if each in PATHS else pytest.mark.long) for each in [*VARIANTS, GROUPS]],
    ids=str,
    indirect=True,
    scope="module",
)
def test_threads(model: Variant, together: list[tuple[list[int], list[object]]]) -> None:
    """Seven requests in a batch, then one alone, by three threads. Few steps: threads without a core wait long."""
    chosen, num_tokens = [*range(3, 10), 26], 4
    params = msgspec.structs.replace(SHORT, max_tokens=num_tokens)
    outputs, _ = generate(model, [PROMPTS[index] for index in chosen], params, num_threads=3, max_num_seqs=7)
    begun = [(tokens[:num_tokens], logprobs[:num_tokens]) for tokens, logprobs in together]
    assert exact(outputs) == [begun[index] for index in chosen]


def test_greedy_params_ask_for_logprobs() -> None:
    """Guards the comparison itself: without logprobs `exact` would compare tokens only."""
    assert GREEDY.logprobs == 3
