"""Vision towers of GGUF files whose matrices have blocks or 16 bits: features are Transformers' with those weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from quire.cli.main import main
from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.kernels.cpu.runtime import NativeRuntime
from quire.models.loader import load_vision
from quire.models.vision import VisionEncoder
from quire.parallel.single import SINGLE_RANK
from tests.e2e.test_gguf_images import TEXTS, TOWERS, WORDS
from tests.fakes.gguf_tower import write_model, write_tower
from tests.models.harness import randomize, save
from tests.models.vision_models import BOUND, expected_features, gemma3, qwen2_5_vl, qwen3_5, qwen3_vl, random_patches

WIDE = {"hidden_size": 64, "intermediate_size": 96}
"""Rows of whole blocks of 32 values."""
BUILDS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3vl": lambda: qwen3_vl(**WIDE, num_heads=2),
    "qwen2vl": lambda: qwen2_5_vl(**WIDE, num_heads=2),
    "gemma3": lambda: gemma3(query_pre_attn_scalar=16, **WIDE),
}
MIXED = ("Q8_0", "F16", "BF16", "F32")


def eight_bits(values: torch.Tensor) -> torch.Tensor:
    """Q8_0 and back: 32 values share a scale, the largest of them / 127 in float16."""
    rows = values.reshape(-1, 32)
    scale = (rows.abs().amax(dim=1, keepdim=True) / 127).half().float()
    return (torch.round(rows / scale.clamp(min=1e-9)).clamp(-128, 127) * scale).view(values.shape)


STORED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": lambda values: values,
    "F16": lambda values: values.half().float(),
    "BF16": lambda values: values.bfloat16().float(),
    "Q8_0": eight_bits,
}


def written(architecture: str, types: tuple[str, ...], directory: Path) -> tuple[PreTrainedModel, Path]:
    """The model with the weights that its file has. types: of the tower's matrices in turn."""
    model = randomize(BUILDS[architecture]())
    count = iter(range(10_000))
    used: set[str] = set()

    def kind_of(name: str, tensor: torch.Tensor) -> str:
        kind = types[next(count) % len(types)]
        kind = "F16" if kind == "Q8_0" and tensor.shape[-1] % 32 else kind  # as llama.cpp does with short rows
        used.add(kind)
        tensor.copy_(STORED[kind](tensor))
        return kind

    keys = TOWERS[architecture] | {"embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 2}
    path = directory / "model.gguf"
    with torch.no_grad():
        write_tower(model, architecture, directory / "mmproj-model.gguf", keys, kind_of)
    assert used >= set(types)
    return model, write_model(model, architecture, path, WORDS[architecture], TEXTS[architecture])


def tower(path: Path, dtype: str, backend: str) -> VisionEncoder:
    config = load_model_config(str(path), dtype=dtype, max_model_len=None, revision=None, config_only=False)
    runtime = None if backend == "torch" else NativeRuntime("auto", 2, "float32")
    return load_vision(config, LoadConfig("auto", 0), SINGLE_RANK, runtime)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize(
    ("architecture", "types"),
    [
        *(("qwen3vl", (kind,)) for kind in ("Q8_0", "F16", "BF16")),
        *((architecture, MIXED) for architecture in BUILDS),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_features(architecture: str, types: tuple[str, ...], backend: str, tmp_path: Path) -> None:
    model, path = written(architecture, types, tmp_path)
    grids = [(1, 8, 8)] if architecture == "gemma3" else [(1, 2, 2), (1, 6, 4)]
    encoder = tower(path, "float32", backend)
    patches = random_patches(grids, values=encoder.config.patch_values)
    if architecture == "gemma3":
        pixels = patches.view(4, 4, 2, 2, 3, 4, 4).permute(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, 32, 32)
        with torch.inference_mode():
            expected = [model.model.get_image_features(pixels, return_dict=True).pooler_output[0]]
    else:
        expected = expected_features(model, patches, grids)
    assert min(float(each.std()) for each in expected) > 0.3, "features too flat to compare"
    for found, wanted in zip(encoder.encode(patches, grids), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=BOUND)


def test_a_plan_states_the_tower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights as they are loaded, and the types of its file."""
    _, path = written("qwen3vl", MIXED, tmp_path)
    flags = ["--memory", "2GiB", "--max-model-len", "64", "--dtype", "float32"]
    assert main(["plan", str(path), *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["vision_tower"]
    assert found["weight_bytes"] == tower(path, "float32", "torch").weight_bytes()
    assert found["working_bytes"] > 256 * 2**20, "features are kept"
    assert set(found["checkpoint_bytes_by_dtype"]) == set(MIXED)
    assert main(["plan", str(path), *flags]) == 0
    assert "vision tower" in capsys.readouterr().out


@pytest.mark.parametrize("build", [qwen3_vl, qwen2_5_vl, qwen3_5, gemma3], ids=lambda build: build.__name__)
def test_number_of_parameters(build: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    encoder = tower(save(build(), tmp_path), "float32", "torch")
    assert 4 * encoder.config.num_elements == encoder.weight_bytes()
