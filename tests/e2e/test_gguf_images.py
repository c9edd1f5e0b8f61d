"""Images with GGUF files: tokens are those of the Hugging Face directory that the files were written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from quire.errors import ConfigError, ModelLoadError, UserError
from tests.e2e.test_images import PROMPTS, engine, tokens
from tests.fakes.gguf_tower import write_model, write_tower
from tests.models.harness import randomize, save
from tests.models.vision_models import (
    GEMMA_PROCESSOR,
    IMAGE_END,
    IMAGE_START,
    IMAGE_TOKEN,
    PROCESSOR,
    qwen2_5_vl,
    qwen3_vl,
    random_gemma3,
)

SIZES = {"patch_size": 4, "feed_forward_length": 72}
LIMITS = {"image_min_pixels": 64, "image_max_pixels": 1600, "spatial_merge_size": 2, "projection_dim": 48}
QWEN = {**SIZES, **LIMITS, "block_count": 4, "embedding_length": 48, "attention.head_count": 3}
TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {**SIZES, "block_count": 3, "embedding_length": 32, "attention.head_count": 2}
    | {"image_size": 32, "projector.scale_factor": 2},
    "qwen3vl": QWEN | {"is_deepstack_layers": [True, False, True, False]},
    "qwen2vl": QWEN | {"n_wa_pattern": 2, "window_size": 16},
}
TEXTS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "attention.sliding_window": 20,
        "attention.sliding_window_pattern": 2,
        "rope.freq_base_swa": 500.0,
    },
    "qwen3vl": {"rope.dimension_sections": [4, 2, 2, 0]},
    "qwen2vl": {"rope.dimension_sections": [2, 1, 1, 0]},
}
WORDS = {
    "gemma3": {"<image_soft_token>": IMAGE_TOKEN, "<start_of_image>": IMAGE_START, "<end_of_image>": IMAGE_END},
    "qwen3vl": {"<|image_pad|>": IMAGE_TOKEN},
    "qwen2vl": {"<|image_pad|>": IMAGE_TOKEN},
}


def built(architecture: str) -> PreTrainedModel:
    if architecture == "gemma3":
        return random_gemma3(query_pre_attn_scalar=16)
    return randomize({"qwen3vl": qwen3_vl, "qwen2vl": qwen2_5_vl}[architecture]())


def written(architecture: str, directory: Path) -> tuple[PreTrainedModel, Path]:
    """The model, and its file with the tower's beside it."""
    model = built(architecture)
    directory.mkdir()
    write_tower(model, architecture, directory / "mmproj-model.gguf", TOWERS[architecture])
    path = directory / "model.gguf"
    return model, write_model(model, architecture, path, WORDS[architecture], TEXTS[architecture])


@pytest.mark.parametrize("architecture", TOWERS)
def test_tokens_are_those_of_the_directory(architecture: str, tmp_path: Path) -> None:
    """By the file beside the model, and named from elsewhere."""
    model, path = written(architecture, tmp_path / "gguf")
    directory = save(model, tmp_path / "hf")
    settings = GEMMA_PROCESSOR if architecture == "gemma3" else PROCESSOR
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    options: dict[str, Any] = {"attention_backend": "torch", "max_num_batched_tokens": 64}
    with engine(directory, **options) as llm:
        expected = tokens(llm, PROMPTS)
    assert expected[0] != expected[2], "the image matters"
    with engine(path.parent, **options) as llm:
        assert tokens(llm, PROMPTS) == expected
    tower = (path.parent / "mmproj-model.gguf").rename(tmp_path / "tower.gguf")
    with engine(path, mmproj=str(tower), **options) as llm:
        assert tokens(llm, PROMPTS[:2]) == expected[:2]


def test_what_is_no_tower_of_the_model(tmp_path: Path) -> None:
    _, gemma = written("gemma3", tmp_path / "gemma3")
    _, qwen = written("qwen3vl", tmp_path / "qwen3vl")
    tower = str(qwen.parent / "mmproj-model.gguf")
    with pytest.raises(ModelLoadError, match="is of a Qwen3VLForCausalLM"), engine(gemma, mmproj=tower):
        pass
    with pytest.raises(ModelLoadError, match="it is no vision tower"), engine(gemma, mmproj=str(gemma)):
        pass
    directory = save(built("qwen3vl"), tmp_path / "hf")
    with pytest.raises(ConfigError, match="mmproj is for GGUF models"), engine(directory, mmproj=tower):
        pass
    (qwen.parent / "mmproj-model.gguf").replace(gemma.parent / "mmproj-model.gguf")
    with engine(gemma, attention_backend="torch") as llm:
        with pytest.raises(UserError, match="not supported"):
            tokens(llm, PROMPTS[:1])
        assert tokens(llm, PROMPTS[3:4]), "text is taken"
