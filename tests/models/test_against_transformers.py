"""Logits and greedy tokens of every family equal those of Transformers, through the paged cache, in chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.long import all_but_long, one_in
from tests.models.conftest import SavedModel
from tests.models.dense_families import DENSE_FAMILIES
from tests.models.families import FAMILIES, llama, rope
from tests.models.harness import PagedRunner, chunked_logits, load, next_logits, random_prompts, randomize, save
from tests.models.hybrid_families import HYBRID_FAMILIES

SavedModels = Callable[[str], SavedModel]
NUM_GENERATED = 32


def reference_logits(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


@pytest.mark.parametrize("name", one_in(2, FAMILIES))
def test_logits_of_a_mixed_batch_in_chunks(name: str, saved_model: SavedModels) -> None:
    saved = saved_model(name)
    prompts = random_prompts([1, 5, 33, 100, 64], 97)
    _, model = load(saved.directory)
    for prompt, logits in zip(prompts, chunked_logits(PagedRunner(model), prompts, chunk=19), strict=True):
        expected = reference_logits(saved.reference, prompt)
        assert expected.std() > 0.5, "logits too flat to compare"
        # Both sides round in float32, to errors in proportion to the logits' spread: up to 2e-5 of it were seen, and
        # 1.5e-4 where a norm behind a delta rule magnifies results near zero.
        tolerance = 5e-4 if name in HYBRID_FAMILIES else 1e-4
        torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance * float(expected.std()))


GREEDY = [name for name in FAMILIES if name not in {**DENSE_FAMILIES, **HYBRID_FAMILIES}]
"""The others generate in tests/e2e."""
ONE_OF_EACH = [
    "gpt2",
    "opt-350m",
    "deepseek-v2-groups",
    "deepseek-v3.2",
    "llama",
    "mistral",
    "mixtral",
    "llama4",
    "gpt-oss",
]


@pytest.mark.parametrize("name", all_but_long(GREEDY, ONE_OF_EACH))
def test_greedy_tokens_of_a_mixed_batch(name: str, saved_model: SavedModels) -> None:
    saved = saved_model(name)
    prompts = random_prompts([3, 40, 17], 97, seed=5)
    _, model = load(saved.directory)
    runner = PagedRunner(model)
    generated = runner.greedy([runner.add(prompt) for prompt in prompts], NUM_GENERATED)
    for prompt, tokens in zip(prompts, generated, strict=True):
        assert len(tokens) == NUM_GENERATED
        assert tokens == next_logits(saved.reference, prompt, tokens).argmax(-1).tolist()


LONG_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.2, 2.0, 3.5, 6.0]}


@pytest.mark.parametrize(
    ("settings", "max_model_len"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 400),
        ({"rope_type": "longrope", "original_max_position_embeddings": 64, **LONG_FACTORS}, 64),
        ({"rope_type": "longrope", "original_max_position_embeddings": 64, **LONG_FACTORS}, 150),
        ({"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 3.0, **LONG_FACTORS}, 256),
    ],
    ids=["dynamic-trained-length", "dynamic-beyond", "longrope-short", "longrope-long", "longrope-factor"],
)
def test_length_dependent_scaling_is_that_of_a_sequence_of_max_model_len(
    settings: dict[str, object], max_model_len: int, tmp_path: object
) -> None:
    reference = randomize(rope(**settings))
    directory = save(reference, tmp_path)
    _, model = load(directory, max_model_len=max_model_len)
    (prompt,) = random_prompts([max_model_len], 97)
    runner = PagedRunner(model, max_len=max_model_len, max_rows=1)
    (logits,) = chunked_logits(runner, [prompt], chunk=77)
    torch.testing.assert_close(logits, reference_logits(reference, prompt), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("fixed_order")
def test_short_sequences_use_the_same_rotation_as_long_ones(tmp_path: object) -> None:
    """Beyond the trained length Transformers changes its rotation as a sequence grows; here a prefix stays as it is."""
    directory = save(randomize(rope("dynamic", factor=2.0)), tmp_path)
    _, model = load(directory, max_model_len=400)
    (prompt,) = random_prompts([300], 97)
    runner = PagedRunner(model, max_len=400, max_rows=2)
    whole, prefix = chunked_logits(runner, [prompt, prompt[:40]], chunk=300)
    assert torch.equal(whole[:40], prefix)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_are_widened(dtype: str, tmp_path: object) -> None:
    directory = save(randomize(llama()).to(getattr(torch, dtype)), tmp_path)
    reference = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config, model = load(directory)
    assert config.dtype == "float32"
    (prompt,) = random_prompts([40], 97)
    (logits,) = chunked_logits(PagedRunner(model), [prompt], chunk=40)
    torch.testing.assert_close(logits, reference_logits(reference, prompt), rtol=0, atol=1e-4)


def test_bfloat16_compute_is_close(saved_model: SavedModels) -> None:
    saved = saved_model("llama")
    _, model = load(saved.directory, dtype="bfloat16")
    (prompt,) = random_prompts([40], 97)
    (logits,) = chunked_logits(PagedRunner(model), [prompt], chunk=13)
    expected = reference_logits(saved.reference, prompt)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().mean() < 0.05 * expected.std()
