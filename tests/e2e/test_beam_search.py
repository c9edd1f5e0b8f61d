"""Beam search over the whole engine: Transformers' hypotheses and scores, and the same bits whatever else runs."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.outputs import CompletionOutput, RequestOutput
from quire.structured_output.grammar import write_grammar
from quire.structured_output.rehearsal import start_matcher
from quire.structured_output.vocabulary import make_vocabulary
from tests.e2e.conftest import Variant, generate
from tests.long import all_but_long
from tests.models.families import FAMILIES
from tests.models.harness import random_prompts, randomize, save

FLATTER = 0.3
"""Logits of the random models are scaled by this: with few sure tokens, beams differ, die and end at all lengths."""
LENGTH_PENALTIES = [-1.0, 0.0, 0.5, 1.0, 2.0]
EARLY_STOPPING: list[bool | str] = [True, False, "never"]

Search = dict[str, Any]


def random_searches(number: int, vocab_size: int, seed: int) -> list[Search]:
    """`number` settings: every length penalty with every kind of early stopping, all else at random."""
    rng = random.Random(seed)
    kinds = itertools.islice(itertools.cycle(itertools.product(LENGTH_PENALTIES, EARLY_STOPPING)), number)
    searches = []
    for length_penalty, early_stopping in kinds:
        width, max_tokens = rng.randint(2, 8), rng.randint(1, 24)
        searches.append(
            {
                "best_of": width,
                "n": rng.randint(1, width),
                "max_tokens": max_tokens,
                "min_tokens": rng.choice([0, 0, min(4, max_tokens)]),
                "repetition_penalty": rng.choice([1.0, 1.0, 1.3]),
                "length_penalty": length_penalty,
                "early_stopping": early_stopping,
                "stop_token_ids": rng.sample(range(vocab_size), rng.choice([1, 1, 3, 8])),
            }
        )
    return searches


def transformers_search(
    model: PreTrainedModel, prompt: list[int], search: Search, **options: Any
) -> list[tuple[list[int], float]]:
    """(generated tokens, score) of each hypothesis. What stands behind an end token is padding."""
    ends = search["stop_token_ids"]
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_beams=search["best_of"],
            num_return_sequences=search["n"],
            max_new_tokens=search["max_tokens"],
            min_new_tokens=search["min_tokens"],
            repetition_penalty=search["repetition_penalty"],
            length_penalty=search["length_penalty"],
            early_stopping=search["early_stopping"],
            eos_token_id=ends,
            pad_token_id=ends[0],
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    hypotheses = []
    for tokens, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        length = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
        hypotheses.append((tokens[:length], score))
    return hypotheses


def assert_equal_searches(llm: LLM, model: PreTrainedModel, prompts: list[list[int]], searches: list[Search]) -> None:
    """All in one batch, one after the other in Transformers."""
    params = [SamplingParams(use_beam_search=True, detokenize=False, **search) for search in searches]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    lengths = set()
    for prompt, search, output in zip(prompts, searches, outputs, strict=True):
        expected = transformers_search(model, prompt, search)
        assert [each.token_ids for each in output.outputs] == [tokens for tokens, _ in expected], search
        # Scores are sums over up to 30 tokens, which Transformers adds in float32.
        scores = [score for _, score in expected]
        assert [each.score for each in output.outputs] == pytest.approx(scores, rel=1e-6, abs=1e-3)
        for each in output.outputs:
            ended = each.token_ids[-1] in search["stop_token_ids"]
            assert each.finish_reason == ("stop" if ended else "length")
            divisor = len(each.token_ids) ** search["length_penalty"]
            assert each.cumulative_logprob / divisor == pytest.approx(each.score)
            lengths.add((len(each.token_ids), ended))
    assert len(lengths) > 10, "the searches are too much alike"


@pytest.mark.parametrize("family", all_but_long(["llama", "gpt2", "qwen3-window", "deepseek-v3"], ["qwen3-window"]))
def test_random_models_against_transformers(family: str, tmp_path: Path) -> None:
    model = randomize(FAMILIES[family]())
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(FLATTER)
    directory = save(model, tmp_path)
    searches = random_searches(15, 97, seed=1)
    prompts = random_prompts([(1, 7, 16, 33)[index % 4] for index in range(15)], 97, seed=2)
    options = {"num_blocks_override": 800, "num_threads": 1, "skip_tokenizer_init": True, "max_num_seqs": 64}
    with LLM(str(directory), queue_depth=2, **options) as llm:
        assert_equal_searches(llm, model, prompts, searches)


@pytest.mark.long
def test_the_bundled_model_against_transformers(bundled_model_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path, dtype=torch.float32).eval()
    options = {"dtype": "float32", "max_model_len": 256, "num_blocks_override": 400, "num_threads": 1}
    texts = ["def add(a, b):\n    return", "import os\n", "class Stack:\n    def __init__(self", "for i in range("]
    with LLM(**options) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [tokenizer.encode(texts[index % 4]) for index in range(15)]
        newline = tokenizer.encode("\n", add_special_tokens=False)
        searches = [
            {**search, "stop_token_ids": [*llm.model_config.eos_token_ids, *newline]}
            for search in random_searches(15, llm.model_config.vocab_size, seed=5)
        ]
        assert_equal_searches(llm, model, prompts, searches)


@pytest.mark.long
def test_constraints_against_transformers(bundled_model_path: Path) -> None:
    """Whose beams may have the tokens that a matcher of their own allows, and the end behind a complete text."""
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path, dtype=torch.float32).eval()
    options = {"dtype": "float32", "max_model_len": 256, "num_blocks_override": 400, "num_threads": 1}
    cases = [
        ("[a-z]{2,6}( = [0-9]{1,3})?", 4, {}),
        ("(True|False|None)", 3, {"length_penalty": 0.0}),
        ("\\[([0-9],){0,4}[0-9]\\]", 5, {"early_stopping": "never"}),
        ("[a-z_]+\\([a-z, ]*\\)", 3, {"repetition_penalty": 1.3, "length_penalty": 2.0}),
    ]
    with LLM(**options) as llm:
        tokenizer, ends = llm.get_tokenizer(), list(llm.model_config.eos_token_ids)
        vocabulary = make_vocabulary(llm.tokenizer, llm.model_config.vocab_size, ends)
        for regex, width, fields in cases:
            prompt = tokenizer.encode("x = ")
            structured = StructuredOutputsParams(regex=regex)
            params = SamplingParams(
                use_beam_search=True, n=width, max_tokens=12, structured_outputs=structured, **fields
            )
            [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            start = start_matcher(vocabulary, write_grammar(structured))

            def allowed(_: int, tokens: torch.Tensor, start: Any = start, num_before: int = len(prompt)) -> list[int]:
                state = start.deep_copy()
                for token in tokens[num_before:].tolist():
                    state.consume_token(token)
                bits = np.frombuffer(state.compute_bitmask(), np.uint8)
                return ends if state.is_stopped() else np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()

            search = {"best_of": width, "n": width, "max_tokens": 12, "min_tokens": 0, "repetition_penalty": 1.0}
            search |= {"length_penalty": 1.0, "early_stopping": False, "stop_token_ids": ends, **fields}
            expected = transformers_search(model, prompt, search, prefix_allowed_tokens_fn=allowed)
            assert [each.token_ids for each in output.outputs] == [tokens for tokens, _ in expected], regex
            scores = [score for _, score in expected]
            assert [each.score for each in output.outputs] == pytest.approx(scores, rel=1e-6, abs=1e-3)
            for each in output.outputs:
                assert (each.finish_reason == "stop") == bool(re.fullmatch(regex, each.text)), each.text


# -- the same bits ------------------------------------------------------------------------------------------

VARIANTS = [
    Variant("llama"),
    Variant("qwen3-window"),
    Variant("gpt2"),
    Variant("deepseek-v3"),
    Variant("llama-wide", {"attention_backend": "torch"}),
    Variant("llama-wide", {"quantization": "w8a8", "kv_cache_dtype": "int8"}),
]
PROMPTS = random_prompts([5, 33, 16, 47, 1, 29, 12, 20], 97, seed=3)
MIXED = [
    SamplingParams(
        use_beam_search=True, n=3, best_of=4, max_tokens=20, stop_token_ids=[3, 4], logprobs=2, detokenize=False
    ),
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2, detokenize=False),
    SamplingParams(use_beam_search=True, n=2, max_tokens=17, early_stopping="never", logprobs=0, detokenize=False),
    SamplingParams(temperature=4.0, seed=1, n=2, best_of=3, max_tokens=12, ignore_eos=True, detokenize=False),
] * 2


@pytest.fixture(scope="module", params=all_but_long(VARIANTS, [*VARIANTS[:2], VARIANTS[3], VARIANTS[5]]), ids=str)
def model(request, saved_model) -> Variant:  # type: ignore[no-untyped-def]
    variant: Variant = request.param
    return replace(variant, directory=str(saved_model(variant.family).directory))


@pytest.fixture(scope="module")
def alone(model: Variant) -> list[list[CompletionOutput]]:
    """Each request in an engine that has nothing else to do."""
    return [
        outputs
        for prompt, params in zip(PROMPTS, MIXED, strict=True)
        for outputs in completions(generate(model, [prompt], params)[0])
    ]


def completions(outputs: Sequence[RequestOutput]) -> list[list[CompletionOutput]]:
    """Tokens, log-probabilities, sums and scores."""
    return [output.outputs for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {"queue_depth": 2},
        {"max_prefill_chunk": 7, "max_num_batched_tokens": 33, "max_num_seqs": 24},
        {"block_size": 8, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_the_same_beside_others(model: Variant, alone: list[list[CompletionOutput]], options: dict[str, Any]) -> None:
    outputs, _ = generate(model, PROMPTS, MIXED, **options)
    assert completions(outputs) == alone


@pytest.mark.parametrize("options", [{"queue_depth": 2, "enable_prefix_caching": False}, {"max_prefill_chunk": 7}])
def test_the_same_preempted(model: Variant, alone: list[list[CompletionOutput]], options: dict[str, Any]) -> None:
    tight = 40 if "window" in model.family else 20  # blocks of two groups in the model with windows
    outputs, stats = generate(model, PROMPTS, MIXED, num_blocks_override=tight, **options)
    assert stats["preemptions_total"] > 0
    assert stats["num_used_blocks"] == 0
    assert completions(outputs) == alone


def test_the_widest_search(model: Variant) -> None:
    params = SamplingParams(use_beam_search=True, n=32, max_tokens=9, stop_token_ids=[3, 4, 5], detokenize=False)
    (output,), _ = generate(model, [PROMPTS[1]], params)
    assert len({tuple(each.token_ids) for each in output.outputs}) == 32
    scores = [each.score for each in output.outputs]
    assert scores == sorted(scores, reverse=True)
