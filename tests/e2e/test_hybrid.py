"""Models with layers that keep a state in the engine: the same bits whatever else happens to a request."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from quire import SamplingParams
from tests.e2e.conftest import GREEDY, Variant, exact, generate
from tests.long import all_but_long
from tests.models.harness import next_logits, random_prompts

VARIANTS = [
    Variant("qwen3.5-small-states", {"num_threads": 2}),
    Variant("qwen3-next-few-experts", {"attention_backend": "torch"}),
]
PROMPTS = random_prompts([150, 1, 64, 30], 97, seed=3)
SHORT = msgspec.structs.replace(GREEDY, max_tokens=12)
FORKS = SamplingParams(temperature=50.0, n=3, seed=5, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=0)
BEAMS = SamplingParams(
    use_beam_search=True, n=2, best_of=3, max_tokens=8, ignore_eos=True, detokenize=False, temperature=0.0
)


@pytest.fixture(scope="module", params=all_but_long(VARIANTS, VARIANTS[:1]), ids=str)
def model(request, saved_model) -> Variant:  # type: ignore[no-untyped-def]
    variant: Variant = request.param
    return replace(
        variant,
        directory=str(saved_model(variant.family).directory),
        options={**variant.options, "state_snapshot_interval": 64},
    )


@pytest.fixture(scope="module")
def together(model: Variant) -> list[object]:
    outputs, _ = generate(model, PROMPTS, SHORT)
    return exact(outputs)


def test_tokens_of_transformers(model: Variant, saved_model, together: list[object]) -> None:  # type: ignore[no-untyped-def]
    outputs, _ = generate(model, PROMPTS[:2], SHORT)
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == 12
        assert tokens == next_logits(saved_model(model.family).reference, prompt, tokens).argmax(-1).tolist()


@pytest.mark.parametrize("options", [{"max_num_seqs": 1}, {"max_prefill_chunk": 7}, {"queue_depth": 2}])
def test_alone_in_chunks_and_planned_ahead(model: Variant, together: list[object], options: dict[str, int]) -> None:
    outputs, _ = generate(model, PROMPTS, SHORT, **options)
    assert exact(outputs) == together


def test_preempted(model: Variant) -> None:
    """All begin together, and need a further block of every group at their border."""
    prompts = random_prompts([60, 62, 61, 59], 97, seed=9)
    expected, _ = generate(model, prompts, SHORT)
    outputs, stats = generate(model, prompts, SHORT, num_blocks_override=20, enable_prefix_caching=False)
    assert stats["preemptions_total"] > 0
    assert exact(outputs) == exact(expected)


def test_prefix_hits_end_at_snapshots(model: Variant, together: list[object]) -> None:
    prompts = [PROMPTS[0], [*PROMPTS[0][:-1], 5], PROMPTS[0]]
    outputs, stats = generate(model, prompts, SHORT, max_num_seqs=1)
    assert stats["prefix_cache_hits_total"] == 2 * 128
    assert [exact(outputs)[index] for index in (0, 2)] == [together[0], together[0]]


def test_samples_and_beams(model: Variant) -> None:
    params = [FORKS, BEAMS]
    outputs, _ = generate(model, PROMPTS[2:4], params)
    chunked, _ = generate(model, PROMPTS[2:4], params, max_prefill_chunk=5)
    assert exact(outputs) == exact(chunked)
    assert len({tuple(completion.token_ids) for completion in outputs[0].outputs}) == 3
