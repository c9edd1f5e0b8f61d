"""Processed pictures have the bits of Transformers' processors with Pillow."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.config.media import MediaSize
from quire.errors import ConfigError, ModelLoadError, UserError
from quire.multimodal.decoding import read_pixels
from quire.multimodal.preparing import Preparation
from quire.multimodal.processors import QwenProcessor, content_key, read_qwen_processor, read_square_processor
from quire.multimodal.sizes import NO_LIMIT, image_limit
from quire.worker.images import device_patches
from tests.multimodal.pictures import draw, many

CPU = torch.device("cpu")
QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 4096, "longest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
QWEN2 = {"min_pixels": 3136, "max_pixels": 40_000, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
GEMMA = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 56, "width": 56},
    "resample": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.5, 0.75],
}


def written(directory: Path, settings: dict[str, Any]) -> Path:
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return directory


def check_qwen(directory: Path, settings: dict[str, Any], images: list[Image.Image]) -> None:
    processor, reference = read_qwen_processor(written(directory, settings)), Qwen2VLImageProcessorPil(**settings)
    for image in images:
        expected = reference(images=[image])
        found = processor.process(read_pixels(image, "image"), "image")
        assert list(found.grid) == expected["image_grid_thw"][0].tolist()
        patches = processor.layout(found).patches()
        assert np.array_equal(device_patches(processor.layout(found), CPU).numpy(), patches)
        assert np.array_equal(patches, expected["pixel_values"]), (image.mode, image.size)
        assert found.num_tokens * processor.merge_size**2 == len(patches)


def check_gemma(directory: Path, images: list[Image.Image]) -> None:
    processor = read_square_processor(written(directory, GEMMA), patch_size=14, side=4, num_tokens=4)
    reference = Gemma3ImageProcessorPil(**GEMMA)
    for image in images:
        planes = np.asarray(reference(images=[image])["pixel_values"][0])
        expected = planes.reshape(3, 2, 2, 14, 2, 2, 14).transpose(1, 4, 2, 5, 0, 3, 6).reshape(16, -1)
        found = processor.process(read_pixels(image, "image"), "image")
        patches = processor.layout(found).patches()
        assert np.array_equal(device_patches(processor.layout(found), CPU).numpy(), patches)
        assert np.array_equal(patches, expected), (image.mode, image.size)


def test_few_pictures_of_every_mode(tmp_path: Path) -> None:
    images = [*many(10), draw(11, size=(500, 3)), draw(12, size=(40, 160))]
    check_qwen(tmp_path, QWEN3, images)
    check_qwen(tmp_path, QWEN2, images[:4])
    check_gemma(tmp_path, images[:4])


@pytest.mark.long
def test_two_hundred_pictures(tmp_path: Path) -> None:
    images = list(many(200))
    check_qwen(tmp_path, QWEN3, images)
    check_qwen(tmp_path, QWEN2, images)
    check_gemma(tmp_path, images)


@pytest.mark.parametrize("shape", [(50, 60, 3), (3, 50, 60), (50, 60, 4), (1, 50, 60), (4, 40, 3), (3, 40, 3)])
def test_arrays(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    processor, reference = read_qwen_processor(written(tmp_path, QWEN3)), Qwen2VLImageProcessorPil(**QWEN3)
    found = processor.process(read_pixels(values, "image"), "image")
    assert np.array_equal(processor.layout(found).patches(), reference(images=[values])["pixel_values"])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_arrays_of_other_types(tmp_path: Path, dtype: type) -> None:
    """Whole numbers of a byte are pixels, as in Transformers."""
    values = np.random.default_rng(1).integers(0, 256, (50, 60, 3)).astype(dtype)
    processor, reference = read_qwen_processor(written(tmp_path, QWEN3)), Qwen2VLImageProcessorPil(**QWEN3)
    found = processor.process(read_pixels(values, "image"), "image")
    assert np.array_equal(processor.layout(found).patches(), reference(images=[values])["pixel_values"])


def test_sizes_that_are_planned(tmp_path: Path) -> None:
    """An image of the size has as many tokens as the limit; what the model makes smaller has no limit of its own."""
    processor = read_qwen_processor(written(tmp_path, QWEN3))
    side = processor.patch_size * processor.merge_size
    planned = image_limit(processor, MediaSize(width=4 * side, height=3 * side))
    assert planned == 12
    for size, is_taken in (((4, 3), True), ((3, 4), True), ((5, 3), False)):
        width, height = (each * side for each in size)
        how = Preparation(processor, (255, 255, 255), planned)
        with nullcontext() if is_taken else pytest.raises(UserError, match=r"x: an image of 15 tokens .* the 12 that"):
            assert how.prepare(draw(1, size=(width, height)), "x").num_tokens == 12
    square = math.isqrt(processor.max_pixels)
    assert image_limit(processor, MediaSize(width=side)) == round(square / side)
    assert image_limit(processor, MediaSize(width=square + 1, height=square + 1)) == NO_LIMIT
    with pytest.raises(ConfigError, match="200 times"):
        image_limit(processor, MediaSize(width=1, height=201))


@pytest.mark.parametrize("step", ["do_rescale", "do_normalize"])
def test_steps_left_out(tmp_path: Path, step: str) -> None:
    check_qwen(tmp_path, {**QWEN3, step: False}, [draw(3)])


def test_sizes_are_those_of_transformers(tmp_path: Path) -> None:
    """Every rounding of sizes, without any pixels."""
    processor = read_qwen_processor(written(tmp_path, QWEN3))
    reference = Qwen2VLImageProcessorPil(**QWEN3)
    generator = np.random.default_rng(2)
    for height, width in generator.integers(1, 700, (400, 2)).tolist():
        if max(height, width) > 200 * min(height, width):
            with pytest.raises(UserError, match="200 times"):
                processor.target_size(height, width, "image")
            continue
        rows, columns = processor.target_size(height, width, "image")
        assert rows * columns // 256 == reference.get_number_of_image_patches(height, width), (height, width)


def test_a_line_is_refused_as_transformers_refuses_it(tmp_path: Path) -> None:
    processor = read_qwen_processor(written(tmp_path, QWEN3))
    pixels = read_pixels(draw(4, size=(10_000, 1)), "image")
    with pytest.raises(UserError, match=r"messages\[0\].*10000 x 1.*200 times") as caught:
        processor.process(pixels, "messages[0]")
    assert caught.value.param == "messages[0]"
    with pytest.raises(ValueError, match="aspect ratio"):
        Qwen2VLImageProcessorPil(**QWEN3)(images=[draw(4, size=(10_000, 1))])


def test_without_resizing_sides_are_multiples(tmp_path: Path) -> None:
    settings = {**QWEN3, "do_resize": False}
    check_qwen(tmp_path, settings, [draw(5, size=(96, 64))])
    with pytest.raises(UserError, match="not multiples of 32"):
        read_qwen_processor(tmp_path).process(read_pixels(draw(5, size=(90, 64)), "image"), "image")


def test_the_key_is_of_pixels_shape_and_options(tmp_path: Path) -> None:
    processor = read_qwen_processor(written(tmp_path, QWEN3))
    pixels = read_pixels(draw(6, size=(64, 96)), "image")
    first = processor.process(pixels, "image")
    assert first.key == processor.process(pixels.copy(), "image").key
    flat = np.zeros((64, 96, 3), np.uint8)
    assert processor.process(flat, "image").key != processor.process(np.zeros((96, 64, 3), np.uint8), "image").key
    changed = pixels.copy()
    changed[95, 63, 2] ^= 1
    darker = msgspec.structs.replace(processor, normalisation=replace(processor.normalisation, mean=(0.5, 0.5, 0.4)))
    others = [processor.process(changed, "image").key, darker.process(pixels, "image").key]
    others.append(content_key(first.pixels, (1, 4, 6), processor))
    assert first.key not in others
    assert len(set(others)) == 3


def test_settings_of_transformers_5_are_in_the_joint_file(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": QWEN3, "processor_class": "X"}))
    assert read_qwen_processor(tmp_path).patch_size == 16


def test_older_settings_have_limits_beside_the_size(tmp_path: Path) -> None:
    processor = read_qwen_processor(written(tmp_path, {**QWEN3, "max_pixels": 9000}))
    assert (processor.min_pixels, processor.max_pixels) == (4096, 9000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": {"height": 5}}, "size: the key 'shortest_edge' is missing"),
        ({"size": 5}, "size must be an object"),
        ({"size": {"shortest_edge": 70_000, "longest_edge": 65_536}}, "shortest_edge .70000 pixels. is over"),
        ({"size": {"shortest_edge": 1, "longest_edge": 2**31 - 1}}, None),
        ({"resample": 6}, "resample 6 is no filter"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std must be a number"),
        ({"image_mean": [0.5, float("nan"), 0.5]}, "image_mean must be a number"),
        ({"image_mean": 0}, None),
        ({"do_convert_rgb": False}, "do_convert_rgb false is not supported"),
        ({"patch_size": 0}, "patch_size must be an integer of at least 1"),
    ],
)
def test_wrong_settings(tmp_path: Path, change: dict[str, Any], message: str | None) -> None:
    written(tmp_path, QWEN3 | change)
    if message is None:
        assert isinstance(read_qwen_processor(tmp_path), QwenProcessor)
        return
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_qwen_processor(tmp_path)
    assert "preprocessor_config.json" in str(caught.value)


def test_pan_and_scan_is_refused(tmp_path: Path) -> None:
    written(tmp_path, GEMMA | {"do_pan_and_scan": True})
    with pytest.raises(ModelLoadError, match="do_pan_and_scan"):
        read_square_processor(tmp_path, 14, 4, 4)


def test_a_checkpoint_without_settings(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no preprocessor_config\.json"):
        read_qwen_processor(tmp_path)
