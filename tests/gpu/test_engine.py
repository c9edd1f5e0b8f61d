"""The whole engine on a card: the tokens of Transformers, and of the plain engine on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from tests.gpu.conftest import generate, greedy, tokens, with_graphs
from tests.models.conftest import SavedModel
from tests.models.harness import random_prompts

pytestmark = pytest.mark.gpu

SavedModels = Callable[[str], SavedModel]
LONG = 32 if torch.cuda.is_available() else 4
PROMPT_LENGTHS = [3, 40, 17] if torch.cuda.is_available() else [3, 7]
# Layers of all families are interpreted in tests/models/test_device_layers.py.
FAMILIES = [
    "gpt2",
    "opt-350m",
    "qwen3-window",
    *(
        pytest.param(name, marks=pytest.mark.gpu(interpretable=False))
        for name in (
            "gpt2-variant",
            "opt",
            "opt-bare",
            "llama",
            "llama-biases",
            "llama-one-kv-head",
            "llama-yarn",
            "mistral",
            "mistral-no-window",
            "qwen2",
            "qwen2-window",
            "qwen3",
            "gemma2",
            "gemma3",
            "mixtral",
            "qwen3-moe",
            "llama4",
            "deepseek-v2",
            "deepseek-v3",
            "deepseek-v3.2",
            "qwen3-next",
            "qwen3.5-small-states",
        )
    ),
]
"""Families behind the dense ones are interpreted in tests/e2e/test_device_families.py."""


def plain_engine(saved: SavedModel) -> LLM:
    """Plain torch operators on the CPU."""
    options = {"dtype": "float32", "num_blocks_override": 400, "skip_tokenizer_init": True, "num_threads": 2}
    return LLM(str(saved.directory), device="cpu", attention_backend="torch", **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_like_transformers(name: str, saved_model: SavedModels) -> None:
    saved = saved_model(name)
    prompts = random_prompts(PROMPT_LENGTHS, 97)
    outputs = tokens(generate(saved.directory, prompts, greedy(LONG)))
    for prompt, (generated,) in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            # Without a mask Transformers takes a prompt's tokens of the id 0 for padding.
            expected = saved.reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LONG, pad_token_id=0
            )
        assert generated == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        with_graphs("full"),
        with_graphs("piecewise"),
        with_graphs("full_and_piecewise"),
        {"queue_depth": 1},
        {"max_num_batched_tokens": 16},
        {"block_size": 32},
        {"num_blocks_override": 16},
        {"num_blocks_override": 16, "preemption_mode": "swap", "swap_space": "64MiB"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3-window", pytest.param("gpt2", marks=pytest.mark.gpu(interpretable=False))])
def test_ways_to_run_change_no_token(name: str, options: dict[str, Any], saved_model: SavedModels) -> None:
    saved = saved_model(name)
    prompts = random_prompts(PROMPT_LENGTHS * 2, 97)
    with plain_engine(saved) as plain:
        expected = plain.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy(LONG), use_tqdm=False)
    outputs = generate(saved.directory, prompts, greedy(LONG), **options)
    assert tokens(outputs) == tokens(expected)


@pytest.mark.parametrize(
    "params",
    [
        greedy(LONG, logprobs=3, prompt_logprobs=2),
        greedy(LONG, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3),
        greedy(LONG, logit_bias={5: 3.0, 9: -100.0}, min_tokens=3, stop_token_ids=[11]),
        greedy(LONG, allowed_token_ids=[1, 2, 3, 50, 60]),
        SamplingParams(
            n=3,
            temperature=1.5,
            seed=1,
            allowed_token_ids=[*range(60)],
            max_tokens=LONG,
            ignore_eos=True,
            detokenize=False,
        ),
        SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True, detokenize=False, n=1, top_k=1),
        SamplingParams(use_beam_search=True, n=3, best_of=3, temperature=0.0, max_tokens=6, detokenize=False),
    ],
    ids=["logprobs", "penalties", "bias", "allowed", "three that share a list", "top-1", "beams"],
)
def test_rules_choose_the_same_tokens_as_on_the_cpu(params: SamplingParams, saved_model: SavedModels) -> None:
    saved = saved_model("llama")
    prompts = random_prompts(PROMPT_LENGTHS, 97, seed=3)
    with plain_engine(saved) as plain:
        expected = plain.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    outputs = generate(saved.directory, prompts, params)
    assert tokens(outputs) == tokens(expected)
    for output, wanted in zip(outputs, expected, strict=True):
        for completion, other in zip(output.outputs, wanted.outputs, strict=True):
            if other.logprobs is not None:
                assert completion.logprobs is not None
                for position, known in zip(completion.logprobs, other.logprobs, strict=True):
                    assert {t: e.logprob for t, e in position.items()} == pytest.approx(
                        {t: e.logprob for t, e in known.items()}, abs=1e-3
                    )


def test_draws_depend_on_the_seed_alone(saved_model: SavedModels) -> None:
    directory = saved_model("llama").directory
    prompts = random_prompts(PROMPT_LENGTHS, 97, seed=4)
    params = [
        SamplingParams(
            temperature=0.9,
            top_p=0.9,
            top_k=20,
            min_p=0.01,
            seed=seed,
            max_tokens=LONG,
            ignore_eos=True,
            detokenize=False,
        )
        for seed in range(len(prompts))
    ]
    together = tokens(generate(directory, prompts, params))
    alone = [tokens(generate(directory, [prompt], each))[0] for prompt, each in zip(prompts, params, strict=True)]
    assert together == alone
    other = [SamplingParams(**{**_fields(each), "seed": 100 + i}) for i, each in enumerate(params)]
    assert tokens(generate(directory, prompts, other)) != together


def _fields(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "ignore_eos", "detokenize")
    return {name: getattr(params, name) for name in names}


def test_many_children_of_one_prompt(saved_model: SavedModels) -> None:
    """Forks copy blocks on the device."""
    directory = saved_model("qwen3-window").directory
    (prompt,) = random_prompts([21], 97)
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=LONG, ignore_eos=True, detokenize=False)
    (one,) = tokens(generate(directory, [prompt], params))
    (other,) = tokens(generate(directory, [prompt], params, enforce_eager=True, queue_depth=1))
    assert one == other
    assert len({tuple(each) for each in one}) == 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(dtype: str, saved_model: SavedModels) -> None:
    """Prompt logprobs within what rounding explains."""
    saved = saved_model("qwen3")
    (prompt,) = random_prompts([40 if LONG > 4 else 9], 97)
    (output,) = generate(saved.directory, [prompt], greedy(1, prompt_logprobs=0), dtype=dtype)
    with torch.inference_mode():
        scores = torch.log_softmax(saved.reference(torch.tensor([prompt])).logits[0].float(), dim=-1)
    assert output.prompt_logprobs is not None
    given = [entry[token].logprob for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
    expected = scores[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    error = (torch.tensor(given) - expected).abs().mean()
    assert 0 < error < 0.1 * expected.std()
