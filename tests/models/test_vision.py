"""Vision towers: features are Transformers', and an image's bits do not depend on those beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.errors import ModelLoadError
from quire.kernels.cpu.runtime import NativeRuntime
from quire.models.loader import load_vision
from quire.models.native_vision import NativeVision
from quire.models.vision import VisionEncoder
from quire.models.vision_grid import Grid
from quire.parallel.single import SINGLE_RANK
from tests.models.harness import randomize, save
from tests.models.vision_models import expected_features, qwen2_5_vl, qwen3_5, qwen3_vl, random_patches

ODD: tuple[Grid, ...] = ((1, 2, 2), (1, 14, 6), (1, 2, 18), (1, 6, 6))
"""Smaller and larger than the table of positions, of six rows and columns."""
BACKENDS = ("torch", "native")
RUNTIMES = {"native": ("auto", 2, "float32"), "rounded": ("bf16_emulated", 2, "bfloat16")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    model = randomize(qwen3_vl())
    return model, save(model, tmp_path_factory.mktemp("qwen3-vl"))


def tower(directory: Path, backend: str = "torch", load_format: str = "auto", dtype: str = "float32") -> VisionEncoder:
    """backend: of RUNTIMES, or torch."""
    config = load_model_config(str(directory), dtype=dtype, max_model_len=None, revision=None, config_only=True)
    runtime = None if backend == "torch" else NativeRuntime(*RUNTIMES[backend])
    return load_vision(config, LoadConfig(load_format, 0), SINGLE_RANK, runtime)


def check(model: PreTrainedModel, encoder: VisionEncoder, grids: tuple[Grid, ...]) -> None:
    patches = random_patches(grids, values=encoder.config.patch_values)
    expected = expected_features(model, patches, grids)
    assert min(float(each.std()) for each in expected) > 0.3, "features too flat to compare"
    for found, wanted in zip(encoder.encode(patches, grids), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_features_are_those_of_transformers(saved: tuple[PreTrainedModel, Path], backend: str) -> None:
    check(saved[0], tower(saved[1], backend), ODD)


@pytest.mark.parametrize("backend", BACKENDS)
def test_frames_attend_to_themselves(saved: tuple[PreTrainedModel, Path], backend: str) -> None:
    check(saved[0], tower(saved[1], backend), ((3, 4, 6), (1, 4, 2)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        # Heads of the 8B model, 72 wide, and features of a layer that is the last.
        {"hidden_size": 144, "num_heads": 2, "deepstack_visual_indexes": [1, 3]},
        {"deepstack_visual_indexes": [], "depth": 1, "spatial_merge_size": 3},
    ],
    ids=["wide", "without deep-stack"],
)
def test_other_shapes(options: dict[str, Any], backend: str, tmp_path: Path) -> None:
    model = randomize(qwen3_vl(**options))
    grids: tuple[Grid, ...] = ((1, 6, 12), (1, 6, 6))
    check(model, tower(save(model, tmp_path), backend), grids)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("build", "options"),
    [
        (qwen2_5_vl, {"intermediate_size": 75}),
        (qwen2_5_vl, {"hidden_size": 80, "num_heads": 1, "window_size": 24, "fullatt_block_indexes": [2]}),
        (qwen3_5, {}),
    ],
    ids=["windows", "heads of 80", "without deep-stack"],
)
def test_other_families(
    build: Callable[..., PreTrainedModel], options: dict[str, Any], backend: str, tmp_path: Path
) -> None:
    """With pictures alone and beside others: smaller than a window, of whole ones, of some that are cut, of frames."""
    model = randomize(build(**options))
    grids: tuple[Grid, ...] = ((1, 2, 2), (1, 14, 6), (2, 8, 10), (1, 6, 6))
    encoder = tower(save(model, tmp_path), backend)
    check(model, encoder, grids)
    patches = random_patches(grids, values=encoder.config.patch_values)
    together = encoder.encode(patches, grids)
    (alone,) = encoder.encode(patches[4:88], grids[1:2])
    assert torch.equal(alone, together[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_image_has_the_same_bits_alone_and_beside_others(saved: tuple[PreTrainedModel, Path], backend: str) -> None:
    encoder = tower(saved[1], backend)
    patches = random_patches(ODD)
    together = encoder.encode(patches, ODD)
    sizes = [rows * columns for _, rows, columns in ODD]
    for image, grid, expected in zip(patches.split(sizes), ODD, together, strict=True):
        (alone,) = encoder.encode(image, [grid])
        assert torch.equal(alone, expected)
    assert all(torch.equal(*pair) for pair in zip(encoder.encode(patches, ODD), together, strict=True))


def test_native_programs_grow_and_give_memory_back(saved: tuple[PreTrainedModel, Path]) -> None:
    encoder = tower(saved[1], "native")
    assert isinstance(encoder, NativeVision)
    small: tuple[Grid, ...] = ((1, 4, 4),)
    patches = random_patches(small)
    (first,) = encoder.encode(patches, small)
    encoder.encode(random_patches([(1, 20, 20)], 1), [(1, 20, 20)])
    assert torch.equal(encoder.encode(patches, small)[0], first)
    encoder.release_workspaces()
    assert torch.equal(encoder.encode(patches, small)[0], first)


def test_products_of_bfloat16_are_for_weights_of_it(saved: tuple[PreTrainedModel, Path]) -> None:
    check(saved[0], tower(saved[1], "rounded"), ODD)


@pytest.mark.parametrize("backend", [*BACKENDS, "rounded"])
def test_sixteen_bits(saved: tuple[PreTrainedModel, Path], backend: str) -> None:
    grids = ODD[1:2]
    patches = random_patches(grids)
    (exact,), (found,) = (
        tower(saved[1], backend, dtype=name).encode(patches, grids) for name in ("float32", "bfloat16")
    )
    assert found.dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(found, exact, dim=1)
    assert float(similarity.min()) > 0.99
    assert not torch.equal(found, exact)


def test_dummy_weights(saved: tuple[PreTrainedModel, Path]) -> None:
    (features,) = tower(saved[1], load_format="dummy").encode(random_patches(ODD[:1]), ODD[:1])
    assert features.shape == (1, 3 * 48)


@pytest.mark.parametrize("prefix", ["visual.", "model.visual."])
def test_both_prefixes_of_checkpoints(saved: tuple[PreTrainedModel, Path], prefix: str, tmp_path: Path) -> None:
    tensors = load_file(saved[1] / "model.safetensors")
    renamed = {name.replace("model.visual.", prefix): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((saved[1] / "config.json").read_text())
    check(saved[0], tower(tmp_path), ODD[:1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_hidden_size": 40}, "out_hidden_size .40. must be the language model's hidden_size .48."),
        ({"num_heads": 5}, "hidden_size .48. must be num_heads .5. times a multiple of 4"),
        ({"num_position_embeddings": 35}, "must be the square of a number, not 35"),
        ({"deepstack_visual_indexes": [2, 0]}, "in ascending order"),
        ({"deepstack_visual_indexes": [4]}, "must name layers of the 4"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported"),
        ({"in_channels": 1}, "in_channels must be 3"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
        ({"depth": 5}, r"tensor 'blocks\.4\.norm1\.weight' and .* missing"),
        ({"depth": 3}, r"tensor 'blocks\.3\..*' does not belong"),
        ({"patch_size": 8}, r"'patch_embed\.proj\.weight' has shape \[48, 3, 2, 4, 4\]"),
    ],
)
def test_errors_name_the_key_or_the_tensor(
    saved: tuple[PreTrainedModel, Path], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values = json.loads((saved[1] / "config.json").read_text())
    values["vision_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").symlink_to(saved[1] / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        tower(tmp_path)


def test_models_without_a_tower_that_is_known(saved: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    values = json.loads((saved[1] / "config.json").read_text())
    values["text_config"] |= {"model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match="no vision tower of Qwen3ForCausalLM is known"):
        tower(tmp_path)
