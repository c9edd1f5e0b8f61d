"""The language model of a model of several modalities, from its checkpoint under every prefix that is in use."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from quire.config.hf_config import load_model_config
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from tests.models.families import LATENT, SMALL
from tests.models.harness import PagedRunner, chunked_logits, load, random_prompts, randomize, save

VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_interleaved": True}


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    text = {"model_type": "llama", **SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    return randomize(
        LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=VISION, image_token_index=96))
    )


def renamed(directory: Path, old: str, new: str) -> None:
    """Give the tensors whose names begin with `old` names that begin with `new`."""
    path = directory / "model.safetensors"
    tensors = {
        (new + name.removeprefix(old) if name.startswith(old) else name): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.language_model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
        ("model.", "lm_head."),
    ],
)
def test_logits_are_those_of_the_whole_model_given_text(
    reference: PreTrainedModel, tmp_path: Path, prefix: str, head: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(reference, tmp_path, save_original_format=False)
    for old, new in (("model.language_model.", prefix), ("lm_head.", head)):
        renamed(tmp_path, old, new)
    with caplog.at_level(logging.INFO, logger="quire"):
        config, model = load(tmp_path)
    assert config.is_multimodal
    assert (config.architecture, config.shape.family) == ("LlamaForCausalLM", "llama")
    (line,) = [record.getMessage() for record in caplog.records if "language model alone" in record.getMessage()]
    assert "multi_modal_projector (4), vision_tower (" in line
    (prompt,) = random_prompts([40], 90)
    (logits,) = chunked_logits(PagedRunner(model), [prompt], chunk=19)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([prompt])).logits[0]
    assert expected.std() > 0.5, "logits too flat to compare"
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_gemma_3_with_its_images(tmp_path: Path) -> None:
    """Keys that its hub files leave out have their usual values: heads, vocabulary, positions."""
    text = {**SMALL, "vocab_size": 262_208, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072}
    vision = {**VISION, "model_type": "siglip_vision_model"}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))
    reference = randomize(model)
    save(reference, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for key in ("vocab_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
        del values["text_config"][key]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config, model = load(tmp_path, max_model_len=64)
    assert (config.architecture, config.is_multimodal) == ("Gemma3ForCausalLM", True)
    (prompt,) = random_prompts([20], 90)
    (logits,) = chunked_logits(PagedRunner(model, max_len=64, max_rows=1), [prompt], chunk=19)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def check_language_model(reference: PreTrainedModel, directory: Path, caplog: pytest.LogCaptureFixture) -> ModelConfig:
    """Logits of text are the whole model's, and one line of the log names the parts that are left out."""
    with caplog.at_level(logging.INFO, logger="quire"):
        config, model = load(directory)
    assert config.is_multimodal
    (line,) = [record.getMessage() for record in caplog.records if "language model alone" in record.getMessage()]
    assert "vision" in line or "visual" in line
    (prompt,) = random_prompts([40], 90)
    (logits,) = chunked_logits(PagedRunner(model), [prompt], chunk=19)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([prompt])).logits[0]
    assert expected.std() > 0.5, "logits too flat to compare"
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    return config


def test_llama_4_with_its_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = {**SMALL, "intermediate_size": 36, "intermediate_size_mlp": 52, "num_local_experts": 4, "head_dim": 16}
    text |= {"attention_chunk_size": 24, "num_hidden_layers": 2, "no_rope_layer_interval": 2}
    vision = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4, "vision_output_dim": 16, "projector_output_dim": 16}
    vision |= {"projector_input_dim": 16}
    config = Llama4Config(text_config=text, vision_config=vision)
    reference = randomize(Llama4ForConditionalGeneration(config))
    save(reference, tmp_path)
    found = check_language_model(reference, tmp_path, caplog)
    assert (found.architecture, found.sliding_windows) == ("Llama4ForCausalLM", (24, None))


def test_qwen_3_vl_with_its_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Text has the same position in all three rows of its rotation."""
    text = {**SMALL, "head_dim": 16, "rope_parameters": {**QWEN_ROPE, "mrope_section": [4, 2, 2]}}
    config = Qwen3VLConfig(text_config=text, vision_config=QWEN_VISION, tie_word_embeddings=True)
    reference = randomize(Qwen3VLForConditionalGeneration(config))
    save(reference, tmp_path)
    found = check_language_model(reference, tmp_path, caplog)
    assert (found.architecture, found.shape.is_tied) == ("Qwen3VLForCausalLM", True)


def test_qwen_2_5_vl_in_one_object(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Hub files have the keys of the language model beside `vision_config`, and older names."""
    windows = {"fullatt_block_indexes": [1], "window_size": 16}
    left_out = ("num_position_embeddings", "deepstack_visual_indexes")
    vision = {name: value for name, value in QWEN_VISION.items() if name not in left_out} | windows
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}
    config = Qwen2_5_VLConfig(text_config={**SMALL, "rope_parameters": rope}, vision_config=vision)
    reference = randomize(Qwen2_5_VLForConditionalGeneration(config))
    save(reference, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    text = values.pop("text_config")
    del text["rope_parameters"]
    scaling = {"type": "mrope", "rope_type": "mrope", "mrope_section": [2, 1, 1]}
    values = {**text, **values, "rope_theta": 500.0, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(values))
    renamed(tmp_path, "model.language_model.", "model.")
    renamed(tmp_path, "model.visual.", "visual.")
    found = check_language_model(reference, tmp_path, caplog)
    assert found.architecture == "Qwen2_5_VLForCausalLM"
    assert found.vision is not None


@pytest.mark.parametrize("is_turned", [False, True])
def test_experts_of_qwen_3_vl_with_its_images(
    is_turned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its hub files keep the experts' matrices as [in, out], Transformers saves [out, in]."""
    text = {**SMALL, "head_dim": 16, "moe_intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2}
    text |= {"rope_parameters": {**QWEN_ROPE, "mrope_section": [4, 2, 2]}, "mlp_only_layers": [1]}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=QWEN_VISION, tie_word_embeddings=False)
    reference = randomize(Qwen3VLMoeForConditionalGeneration(config))
    save(reference, tmp_path)
    path = tmp_path / "model.safetensors"
    if is_turned:
        tensors = load_file(path)
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
    found = check_language_model(reference, tmp_path, caplog)
    assert (found.architecture, found.shape.is_tied) == ("Qwen3VLMoeForCausalLM", False)


@pytest.mark.parametrize("kind", ["deepseek_v3", "kimi_k2"])
def test_kimi_k25_with_its_images(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """kind: what Transformers, and what the hub's files, call the language model."""
    vision = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"patch_size": 2, "pos_emb_height": 4, "pos_emb_width": 4}
    text = {"model_type": "deepseek_v3", **LATENT}
    config = Kimi_K25Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    reference = randomize(Kimi_K25ForConditionalGeneration(config))
    save(reference, tmp_path)
    # Transformers 5.23 gives the layers of the language model the name of those of the vision tower.
    renamed(tmp_path, "language_model.model.blocks.", "language_model.model.layers.")
    values = json.loads((tmp_path / "config.json").read_text())
    values["text_config"]["model_type"] = kind
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert check_language_model(reference, tmp_path, caplog).architecture == "DeepseekV3ForCausalLM"


def test_a_tensor_of_the_language_model_is_missed(reference: PreTrainedModel, tmp_path: Path) -> None:
    save(reference, tmp_path, save_original_format=False)
    renamed(tmp_path, "model.language_model.norm.weight", "elsewhere")
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight' missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "new"}, "unknown architecture 'LlavaForConditionalGeneration'"),
        ({"model_type": "kimi_linear"}, "KimiLinearForCausalLM keeps states"),
        ({"num_attention_heads": 5}, "text_config: hidden_size .48. must be a multiple"),
    ],
)
def test_errors_name_the_configuration_that_they_are_about(
    reference: PreTrainedModel, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    values = json.loads(reference.config.to_json_string())
    values["architectures"] = ["LlavaForConditionalGeneration"]
    values["text_config"] |= {"architectures": None, "head_dim": None, "num_key_value_heads": None, **change}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(str(tmp_path), dtype="auto", max_model_len=None, revision=None, config_only=True)


def test_outer_keys_take_precedence(tmp_path: Path) -> None:
    inner = {"model_type": "llama", "torch_dtype": "float32", "tie_word_embeddings": True, "eos_token_id": 1, **SMALL}
    outer = {
        "architectures": ["LlavaForConditionalGeneration"],
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "eos_token_id": [3, 4],
        "text_config": inner,
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    config = load_model_config(str(tmp_path), dtype="auto", max_model_len=None, revision=None, config_only=True)
    assert (config.dtype, config.shape.is_tied, config.eos_token_ids) == ("bfloat16", False, (3, 4))
