"""Images on a card: tower, deep-stack rows and rotary positions of three axes are those of the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel

from quire import LLM
from quire.config.hf_config import load_model_config
from quire.config.load import LoadConfig
from quire.layers.device import DeviceLayers
from quire.models.loader import load_vision
from quire.models.vision import VisionEncoder
from quire.models.vision_grid import Grid
from quire.parallel.single import SINGLE_RANK
from tests.gpu.conftest import greedy, open_engine, tokens, with_graphs
from tests.models.harness import randomize, save
from tests.models.vision_models import (
    GEMMA_PROCESSOR,
    IMAGE_END,
    IMAGE_START,
    IMAGE_TOKEN,
    PROCESSOR,
    gemma3,
    qwen2_5_vl,
    qwen3_vl,
    random_gemma3,
    random_patches,
)
from tests.multimodal.pictures import draw

pytestmark = pytest.mark.gpu

ON_CARD = torch.cuda.is_available()
WIDE, TALL, SMALL = (draw(seed, size=size) for seed, size in ((1, (48, 24)), (2, (16, 40)), (3, (8, 8))))
GREEDY = greedy(8 if ON_CARD else 2, logprobs=3)


def prompt(*parts: int | Image.Image) -> dict[str, Any]:
    """A prompt of tokens and images."""
    token_ids: list[int] = []
    for part in parts:
        token_ids += [part] if isinstance(part, int) else [IMAGE_START, IMAGE_TOKEN, IMAGE_END]
    return {
        "prompt_token_ids": token_ids,
        "multi_modal_data": {"image": [part for part in parts if not isinstance(part, int)]},
    }


PROMPTS = [prompt(5, 6, 7, WIDE, 8, 9), {"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11]}]
if ON_CARD:
    PROMPTS += [prompt(WIDE, 8, TALL, TALL, 5), prompt(5, 6, 7, TALL, 8, 9), prompt(*range(10, 60), SMALL, 3, WIDE)]
NUM_IMAGES = 3 if ON_CARD else 1
"""Different images of the prompts."""


def save_model(model: PreTrainedModel, path: Path, processor: dict[str, Any] = PROCESSOR) -> Path:
    save(model, path)
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(randomize(qwen3_vl()), tmp_path_factory.mktemp("qwen3-vl"))


def answered(llm: LLM, prompts: list[dict[str, Any]] = PROMPTS) -> list[Any]:
    return llm.generate(list(prompts), GREEDY, use_tqdm=False)


def on_cpu(directory: Path) -> list[Any]:
    """Outputs of plain torch operators."""
    options = {"dtype": "float32", "num_blocks_override": 400, "skip_tokenizer_init": True, "num_threads": 2}
    with LLM(str(directory), device="cpu", attention_backend="torch", **options) as llm:
        return answered(llm)


@pytest.fixture(scope="module")
def expected(saved: Path) -> list[Any]:
    return on_cpu(saved)


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True, "max_num_batched_tokens": 16},
        with_graphs("piecewise"),
        with_graphs("full_and_piecewise"),
        pytest.param({"batch_invariant": True}, marks=pytest.mark.gpu(interpretable=False)),
    ],
    ids=str,
)
def test_tokens_are_those_of_the_cpu(saved: Path, expected: list[Any], options: dict[str, Any]) -> None:
    """Eagerly in chunks that end inside images, and in graphs; then from the prefix cache."""
    check(saved, expected, options)


def check(directory: Path, expected: list[Any], options: dict[str, Any]) -> None:
    with open_engine(directory, **options) as llm:
        for _ in range(2 if ON_CARD else 1):
            found = answered(llm)
            assert tokens(found) == tokens(expected)
            for output, wanted in zip(found, expected, strict=True):
                for step, other in zip(output.outputs[0].logprobs, wanted.outputs[0].logprobs, strict=True):
                    assert {token: each.logprob for token, each in step.items()} == pytest.approx(
                        {token: each.logprob for token, each in other.items()}, abs=1e-3
                    )
        assert llm.stats()["encoded_images_total"] == NUM_IMAGES


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_gemma3(), tmp_path_factory.mktemp("gemma3"), GEMMA_PROCESSOR)


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True, "max_num_batched_tokens": 40},
        with_graphs("full_and_piecewise"),
        pytest.param({"batch_invariant": True}, marks=pytest.mark.gpu(interpretable=False)),
    ],
    ids=str,
)
def test_tokens_that_see_one_another(gemma: Path, options: dict[str, Any]) -> None:
    """In windows and without, in chunks that end at images."""
    check(gemma, on_cpu(gemma), options)


@pytest.mark.gpu(interpretable=False)
def test_a_card_computes_an_image_alike_beside_others(saved: Path) -> None:
    with open_engine(saved, batch_invariant=True) as llm:
        together = answered(llm)
    with open_engine(saved, batch_invariant=True, max_num_batched_tokens=16) as llm:
        alone = [answered(llm, [each])[0] for each in PROMPTS]
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("build", "vision"),
    [
        (qwen3_vl, {"hidden_size": 144, "num_heads": 2}),
        (qwen2_5_vl, {"hidden_size": 80, "num_heads": 1, "intermediate_size": 75}),
        (gemma3, {}),
    ],
    ids=["deep-stack, heads of 72", "windows, heads of 80", "pooled"],
)
def test_features(
    build: Callable[..., PreTrainedModel], vision: dict[str, Any], dtype: str, device: torch.device, tmp_path: Path
) -> None:
    """Several images at once, larger and smaller than windows and the table of positions."""
    directory = save_model(randomize(build(**vision)), tmp_path)
    grids: list[Grid] = [(1, 2, 2), (1, 14, 6), (1, 6, 6)] if ON_CARD else [(1, 6, 4)]
    if build is gemma3:
        grids = [(1, 8, 8)] * (1 + ON_CARD)

    def tower(dtype: str, layers: DeviceLayers | None) -> VisionEncoder:
        config = load_model_config(str(directory), dtype=dtype, max_model_len=None, revision=None, config_only=True)
        return load_vision(config, LoadConfig("auto", 0), SINGLE_RANK, device_layers=layers)

    exact, on_device = tower("float32", None), tower(dtype, DeviceLayers(device))
    patches = random_patches(grids, values=exact.config.patch_values)
    for found, wanted in zip(on_device.encode(patches, grids), exact.encode(patches, grids), strict=True):
        assert found.device.type == device.type
        if dtype == "float32":
            torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=1e-3)
        assert float(torch.nn.functional.cosine_similarity(found.cpu(), wanted, dim=1).min()) > 0.99


def test_a_sleeping_tower(saved: Path) -> None:
    """Its weights leave the device and come back with the model's."""
    given = [prompt(5, 6, draw(4, size=(16, 16)), 7)]
    with open_engine(saved) as llm:
        before = tokens(answered(llm, given))
        held = torch.cuda.memory_allocated() if ON_CARD else 0
        llm.sleep(level=1)
        if ON_CARD:
            assert torch.cuda.memory_allocated() < held
        llm.wake_up()
        assert tokens(answered(llm, given)) == before
        assert llm.stats()["encoded_images_total"] == 2, "features were dropped"
