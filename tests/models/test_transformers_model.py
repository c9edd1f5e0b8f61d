"""Models that have no code of their own here, through Transformers' modelling code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from quire import LLM, BeamSearchParams, SamplingParams
from quire.config.hf_config import load_model_config
from quire.errors import ConfigError, ModelLoadError
from quire.models.transformers_model import TransformersModel
from tests.e2e.device_models import continuation
from tests.long import all_but_long, one_in
from tests.models.harness import PagedRunner, chunked_logits, load, next_logits, random_prompts, randomize, save

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": None,
}
OLD_SIZES = {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
FAMILIES: dict[str, dict[str, Any]] = {
    "Cohere": {"logit_scale": 0.5},
    "Cohere2": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    "Ernie4_5": {},
    "Exaone4": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    "GPTNeoX": {},
    "NanoChat": {},
    "Phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "SeedOss": {},
    "StableLm": {"partial_rotary_factor": 0.5},
    "Starcoder2": {"tie_word_embeddings": True},
}
PROMPTS = random_prompts([21, 6, 33], 97)
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "num_blocks_override": 40,
    "max_model_len": 96,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
}


def make(name: str) -> PreTrainedModel:
    model_class = getattr(transformers, f"{name}ForCausalLM")
    config = model_class.config_class(**{**(OLD_SIZES if name == "GPTNeoX" else SIZES), **FAMILIES.get(name, {})})
    return randomize(model_class(config))


def generate(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[list[int]]]:
    """Token ids of each prompt's completions."""
    wanted = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(wanted, SamplingParams(**{**GREEDY, **params}), use_tqdm=False)
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


@pytest.mark.parametrize("name", one_in(2, FAMILIES))
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts in chunks, several at once, over scattered blocks."""
    reference = make(name)
    config, model = load(save(reference, tmp_path))
    assert config.impl == "transformers"
    computed = chunked_logits(PagedRunner(model), PROMPTS, 7)
    for prompt, logits in zip(PROMPTS, computed, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """A window, parallel blocks, a scale of logits, tied tables."""
    reference = make("Cohere2")
    return reference, save(reference, tmp_path_factory.mktemp("cohere2"))


@pytest.fixture(scope="module", params=["native", "torch"])
def llm(request: pytest.FixtureRequest, tiny: tuple[PreTrainedModel, Path]) -> Iterator[LLM]:
    with LLM(str(tiny[1]), attention_backend=request.param, **OPTIONS) as engine:
        yield engine


def test_an_engine(llm: LLM, tiny: tuple[PreTrainedModel, Path]) -> None:
    """Chunks, a batch, prefix hits, several completions, beams."""
    expected = [continuation(tiny[0], prompt, 8) for prompt in PROMPTS]
    assert generate(llm, PROMPTS, max_tokens=8) == [[tokens] for tokens in expected]
    assert generate(llm, [PROMPTS[2]], max_tokens=8, n=2) == [[expected[2]] * 2]
    assert llm.stats()["prefix_cache_hit_rate"] > 0.0
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    beams = llm.beam_search([{"prompt_token_ids": PROMPTS[1]}], params)
    with torch.inference_mode():
        ids = torch.tensor([PROMPTS[1]])
        reference = tiny[0].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=3,
            max_new_tokens=5,
            do_sample=False,
            num_return_sequences=3,
        )
    assert [each.tokens[-5:] for each in beams[0].sequences] == reference[:, len(PROMPTS[1]) :].tolist()


@pytest.mark.parametrize("mode", all_but_long(["recompute", "swap"], ["swap"]))
def test_preemption(mode: str, tiny: tuple[PreTrainedModel, Path]) -> None:
    options = {**OPTIONS, "num_blocks_override": 14, "preemption_mode": mode}
    if mode == "swap":
        options["swap_space"] = "1MiB"
    with LLM(str(tiny[1]), attention_backend="native", **options) as llm:
        for prompt, (tokens,) in zip(PROMPTS, generate(llm, PROMPTS, max_tokens=40), strict=True):
            assert len(tokens) == 40
            assert tokens == next_logits(tiny[0], prompt, tokens).argmax(-1).tolist()
        assert llm.stats()["preemptions_total"] > 0


@pytest.mark.parametrize("quantization", all_but_long([None, "int8"], ["int8"]))
def test_a_family_of_our_own_both_ways(quantization: str | None, tmp_path: Path) -> None:
    directory = save(make("Llama"), tmp_path)
    found = []
    for impl in ("quire", "transformers"):
        with LLM(
            str(directory), attention_backend="native", quantization=quantization, model_impl=impl, **OPTIONS
        ) as llm:
            found.append(generate(llm, PROMPTS, max_tokens=6))
    assert found[0] == found[1]


def test_modules_of_one_tensor_are_computed_together(tmp_path: Path) -> None:
    """Of a LLaMA: the norm with the projections, attention with its output, the norm with the gated block; between them
    additions are all that is left to torch."""
    with LLM(
        str(save(make("Llama"), tmp_path)), attention_backend="native", model_impl="transformers", **OPTIONS
    ) as llm:
        generate(llm, PROMPTS[:1], max_tokens=1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            generate(llm, PROMPTS[:2], max_tokens=2)
    computed = {each.key.removeprefix("aten::") for each in profile.key_averages()}
    assert "add" in computed
    assert not computed & {"rsqrt", "silu", "neg", "pow", "mm", "addmm"}


def test_on_a_device(tmp_path: Path) -> None:
    reference = make("Starcoder2")
    with LLM(str(save(reference, tmp_path)), device="cpu", attention_backend="triton", **OPTIONS) as llm:
        assert generate(llm, PROMPTS[1:2], max_tokens=2) == [[continuation(reference, PROMPTS[1], 2)]]


@pytest.mark.parametrize("name", all_but_long(["Falcon", "Bloom", "Mpt"], ["Bloom"]))
def test_code_that_attends_in_its_own_way_is_refused(name: str, tmp_path: Path) -> None:
    model_class = getattr(transformers, f"{name}ForCausalLM")
    config = model_class.config_class(vocab_size=97, hidden_size=48, num_hidden_layers=1, num_attention_heads=4)
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(tmp_path)
    described = load_model_config(str(tmp_path), dtype="float32", max_model_len=None, revision=None, config_only=True)
    with pytest.raises(ModelLoadError, match=f"{name}ForCausalLM has no code .* does not use the attention interface"):
        TransformersModel(described, None, None)  # type: ignore[arg-type]


def refusal(directory: Path, values: dict[str, Any], **options: Any) -> str:
    (directory / "config.json").write_text(json.dumps({"model_type": "x", **SIZES, **values}))
    with pytest.raises((ModelLoadError, ConfigError)) as caught:
        LLM(str(directory), load_format="dummy", **{**OPTIONS, **options})
    return str(caught.value)


def test_what_cannot_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    neox = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
    assert "unknown architecture 'GPTNeoXForCausalLM'" in refusal(tmp_path, neox, model_impl="quire")
    assert "model_impl must be one of auto, quire, transformers" in refusal(tmp_path, neox, model_impl="terratorch")
    assert "unknown architecture 'NoSuchForCausalLM'" in refusal(tmp_path, {"architectures": ["NoSuchForCausalLM"]})
    assert "an encoder and a decoder" in refusal(
        tmp_path, {"architectures": ["BartForCausalLM"], "is_encoder_decoder": True}
    )
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    assert "depends on the other sequences" in refusal(tmp_path, neox | {"rope_parameters": rope})
    assert "runs through Transformers" in refusal(tmp_path, neox, tensor_parallel_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.config.hf_config.has_transformers", lambda: False)
        assert "pip install -e '.[transformers]'" in refusal(tmp_path, neox)
