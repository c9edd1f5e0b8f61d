"""Drafts change when tokens come and not which: tokens and logprobs are, bit by bit, those without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import pytest

from quire import SamplingParams
from tests.e2e.conftest import Variant, exact, generate
from tests.long import all_but_long
from tests.models.conftest import SavedModel
from tests.models.harness import random_prompts

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
TORCH = {"attention_backend": "torch"}
BORDERS = {"state_snapshot_interval": 64}
VARIANTS = [
    Variant("llama"),
    Variant("qwen3-window"),
    Variant("llama-wide", TORCH),
    Variant("deepseek-v3.2"),
    Variant("qwen3.5-small-states", BORDERS),
    Variant("qwen3-next-few-experts", {**TORCH, **BORDERS}),
    Variant("qwen3-window", TORCH),
    Variant("llama-wide", {"quantization": "int8", "kv_cache_dtype": "int8"}),
    Variant("deepseek-v3.2", TORCH),
]
FEW_BLOCKS = {"qwen3-window": 60, "qwen3.5-small-states": 22, "qwen3-next-few-experts": 18}
"""Fewer than the requests take together, of models with several KV groups."""
FEW: dict[str, Any] = {"allowed_token_ids": [5, 6, 7], "ignore_eos": True, "max_tokens": 24, "detokenize": False}
"""So few tokens that some of those that are looked up are drawn, and others are not."""
SHARED = random_prompts([66], 97, seed=4)[0]
_OTHERS = random_prompts([9, 50, 3, 20], 97, seed=3)
PROMPTS = [[*SHARED, 3], *_OTHERS[:2], [*SHARED, 4, 5], *_OTHERS[2:]]
KINDS: list[SamplingParams] = [
    SamplingParams(temperature=0, logprobs=2, **FEW),
    # So hot that the seed alone chooses between two tokens: on every processor the same drafts are right and wrong.
    SamplingParams(temperature=100.0, seed=1, logprobs=0, **FEW | {"allowed_token_ids": [5, 6]}),
    SamplingParams(temperature=1.0, seed=2, n=3, top_p=0.9, **FEW),
    SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, **FEW),
    SamplingParams(temperature=0.5, seed=3, bad_words=[], min_p=0.1, prompt_logprobs=1, logprobs=3, **FEW),
    SamplingParams(temperature=0, use_beam_search=True, n=2, max_tokens=8, ignore_eos=True, detokenize=False),
]


@pytest.fixture(scope="module", params=all_but_long(VARIANTS, VARIANTS[:5]), ids=str)
def model(request: pytest.FixtureRequest, saved_model: Callable[[str], SavedModel]) -> Variant:
    variant: Variant = request.param
    return replace(variant, directory=str(saved_model(variant.family).directory))


def in_turn(model: Variant, is_odd: bool) -> int:
    """0 or 1, the other one for the next variant, and the other one for the other value."""
    place = [str(each) for each in VARIANTS].index(str(model))
    return (place + is_odd) % 2


@pytest.fixture(scope="module")
def known() -> dict[str, list[object]]:
    """Results without drafts, by variant: tests come to a variant more than once."""
    return {}


@pytest.fixture(scope="module")
def plain(model: Variant, known: dict[str, list[object]]) -> list[object]:
    """Without drafts."""
    if str(model) not in known:
        outputs, stats = generate(model, PROMPTS, KINDS)
        assert stats["draft_tokens_total"] == 0
        known[str(model)] = exact(outputs)
    return known[str(model)]


def check(
    model: Variant, plain: list[object], speculative_config: dict[str, Any] = NGRAM, **options: Any
) -> dict[str, Any]:
    """Options with drafts change no bit; some drafts are right, and not all. Returns the statistics."""
    outputs, stats = generate(model, PROMPTS, KINDS, speculative_config=speculative_config, **options)
    assert exact(outputs) == plain
    accepted, drafts = stats["accepted_draft_tokens_total"], stats["draft_tokens_total"]
    assert isinstance(accepted, int)
    assert isinstance(drafts, int)
    assert 0 < accepted < drafts
    return stats


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_equal_bits(model: Variant, plain: list[object], queue_depth: int) -> None:
    stats = check(model, plain, queue_depth=queue_depth)
    assert stats["prefix_cache_hits_total"] > 0


@pytest.mark.parametrize("mode", all_but_long(["swap", "recompute"], ["recompute"]))
def test_in_chunks_with_few_blocks(model: Variant, plain: list[object], mode: str) -> None:
    """Preempted requests are computed again, or swapped. Models take turns in which of both has two steps in flight."""
    few: dict[str, Any] = {"block_size": 8, "num_blocks_override": FEW_BLOCKS.get(model.family, 34)}
    few |= {"max_prefill_chunk": 11, "queue_depth": 1 + in_turn(model, mode == "recompute")}
    if mode == "swap":
        few |= {"preemption_mode": "swap", "swap_space": "1MiB"}
    stats = check(model, plain, **few)
    assert stats["preemptions_total"] > 0
    assert (stats["swap_preemptions_total"] > 0) == (mode == "swap")


@pytest.mark.parametrize("most", all_but_long([1, 7], [7]))
def test_other_numbers_of_drafts(model: Variant, plain: list[object], most: int) -> None:
    outputs, stats = generate(
        model, PROMPTS, KINDS, speculative_config={**NGRAM, "num_speculative_tokens": most}, max_num_batched_tokens=64
    )
    assert exact(outputs) == plain
    assert stats["accepted_draft_tokens_total"]


OTHERS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0},
    "hostile": {"method": "custom_class", "model": "tests.fakes.drafts.HostileDrafter"},
}


@pytest.mark.parametrize(
    ("model", "method", "queue_depth"),
    all_but_long(
        # Each variant meets both drafters and both depths, the first one all of them.
        [
            (model, method, depth)
            for model in VARIANTS
            for method, depth in product(OTHERS, [1, 2])
            if model is VARIANTS[0] or depth == 1 + in_turn(model, method == "suffix")
        ],
        [(VARIANTS[0], "suffix", 2), (VARIANTS[0], "hostile", 1)],
    ),
    indirect=["model"],
    ids=str,
)
def test_other_drafters(model: Variant, plain: list[object], method: str, queue_depth: int) -> None:
    """With few blocks, so that sequences give their slots up and come back."""
    few = {"block_size": 8, "num_blocks_override": FEW_BLOCKS.get(model.family, 34), "max_prefill_chunk": 11}
    drafts = {"num_speculative_tokens": 3, **OTHERS[method]}
    outputs, stats = generate(model, PROMPTS, KINDS, speculative_config=drafts, queue_depth=queue_depth, **few)
    assert exact(outputs) == plain
    accepted, computed = stats["accepted_draft_tokens_total"], stats["draft_tokens_total"]
    assert isinstance(accepted, int)
    assert isinstance(computed, int)
    assert 0 < accepted < computed
    assert stats["preemptions_total"]


def test_nothing_is_found(saved_model: Callable[[str], SavedModel]) -> None:
    """No text repeats 60 tokens: no step computes a draft."""
    never = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 60, "prompt_lookup_max": 60}
    model = Variant("llama", directory=str(saved_model("llama").directory))
    params = msgspec.structs.replace(KINDS[1], allowed_token_ids=None)
    outputs, stats = generate(model, PROMPTS[:2], params, speculative_config=never)
    expected, _ = generate(model, PROMPTS[:2], params)
    assert exact(outputs) == exact(expected)
    assert stats["draft_tokens_total"] == 0
