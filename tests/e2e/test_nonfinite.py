"""A prompt that makes the model compute NaN: its keys and values are NaN, too, and lie in blocks that others get."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire import LLM, SamplingParams
from quire.beam_search_params import BeamSearchParams
from quire.errors import ModelOutputError
from tests.e2e.conftest import GREEDY, exact
from tests.e2e.device_models import SIZES, greedy, open_engine, run
from tests.long import all_but_long, one_in
from tests.models.families import FAMILIES, llama
from tests.models.harness import randomize, save

POISON = 77
DRAWN = SamplingParams(temperature=0.9, top_p=0.8, seed=3, max_tokens=24, ignore_eos=True, detokenize=False)
SOUND = [([5, 6, 7] * 9, GREEDY), ([9, 8] * 20, DRAWN), (list(range(40, 70)), GREEDY)]


def token_prompts(*prompts: list[int]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an embedding that is no number."""
    model = randomize(llama())
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = math.nan
    return save(model, tmp_path_factory.mktemp("poisoned"))


@pytest.fixture(scope="module", params=all_but_long(["torch", "native"], ["native"]))
def llm(request: pytest.FixtureRequest, poisoned: Path) -> Iterator[LLM]:
    """In a small pool: blocks go round."""
    options: dict[str, Any] = {"num_threads": 1, "num_blocks_override": 30, "skip_tokenizer_init": True}
    with LLM(str(poisoned), attention_backend=request.param, max_model_len=200, **options) as engine:
        yield engine


def test_others_do_not_notice(llm: LLM) -> None:
    alone = [exact(llm.generate(token_prompts(prompt), params, use_tqdm=False)) for prompt, params in SOUND]
    first, second, third = SOUND
    batch = [first, ([1, 2, POISON, 3], GREEDY), second, third, ([4] * 30 + [POISON], DRAWN)]
    prompts, params = zip(*batch, strict=True)
    for _ in range(3):  # also in blocks that hold NaN
        llm.reset_prefix_cache()
        outputs = llm.generate(token_prompts(*prompts), list(params), use_tqdm=False)
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons == ["length", "error", "length", "length", "error"]
        assert outputs[1].outputs[0].token_ids == outputs[4].outputs[0].token_ids == []
        assert [exact([outputs[index]]) for index in (0, 2, 3)] == alone
    assert llm.stats()["num_used_blocks"] == 0


def test_a_prefix_that_cannot_be_computed_is_not_registered(llm: LLM) -> None:
    with pytest.raises(ModelOutputError, match="NaN or infinite logits"):
        llm.register_prefix({"prompt_token_ids": [1, 2, POISON]})
    assert llm.stats()["num_registered_blocks"] == 0


def test_a_beam_search(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    with pytest.raises(ModelOutputError, match="NaN or infinite logits"):
        llm.beam_search(token_prompts([1, 2, POISON]), params)
    assert len(llm.beam_search(token_prompts([1, 2, 3]), params)[0].sequences) == 2


def test_its_prompt_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, detokenize=False)
    output, sound = llm.generate(token_prompts([1, 2, POISON, 3], [1, 2, 4, 3]), params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert sound.outputs[0].finish_reason == "length"
    assert len(sound.prompt_logprobs or []) == 4


@pytest.mark.parametrize(
    ("family", "backend"), one_in(2, ["qwen3.5-small-states", "deepseek-v3.2"], ["native", "torch"])
)
def test_states_and_latents_of_others(family: str, backend: str, tmp_path: Path) -> None:
    """A state is read whole, and an indexer's key scores every later token: neither may be what a former owner left."""
    model = randomize(FAMILIES[family]())
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = math.nan
    options: dict[str, Any] = {"num_threads": 1, "num_blocks_override": 30, "skip_tokenizer_init": True}
    options |= {"state_snapshot_interval": 64, "max_model_len": 140, "attention_backend": backend}
    sound = msgspec.structs.replace(GREEDY, max_tokens=12, logit_bias={POISON: -100.0})
    batch = [([1, 2, POISON, 3], GREEDY), ([5, 6, 7] * 25, sound), ([4] * 70 + [POISON], DRAWN)]
    prompts, params = zip(*batch, strict=True)
    with LLM(str(save(model, tmp_path)), **options) as llm:
        first = llm.generate(token_prompts(prompts[1]), params[1], use_tqdm=False)
        assert first[0].outputs[0].finish_reason == "length"
        alone = exact(first)
        for _ in range(3):  # also in blocks that hold NaN
            llm.reset_prefix_cache()
            outputs = llm.generate(token_prompts(*prompts), list(params), use_tqdm=False)
            assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length", "error"]
            assert exact(outputs[1:2]) == alone
        assert llm.stats()["num_used_blocks"] == 0


@pytest.mark.long
def test_on_a_device(tmp_path: Path) -> None:
    """Two steps are in flight: one runs on what the non-finite one left."""
    model = randomize(llama(**SIZES))
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = math.nan
    sound, bad = [5, 6, 7], [1, POISON, 3, 4, 5]
    with open_engine(save(model, tmp_path), batch_invariant=True, num_blocks_override=10) as llm:
        (alone,) = run(llm, [sound], greedy(4, logprobs=0))
        for _ in range(2):  # blocks go round
            outputs = run(llm, [bad, sound, bad], greedy(4, logprobs=0))
            assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length", "error"]
            assert exact(outputs[1:2]) == exact([alone])
