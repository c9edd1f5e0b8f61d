"""Pixels for a vision encoder: resizing, patches, normalization.

Processors come from preprocessor_config.json; results equal Transformers' with Pillow bit for bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quire.config.gguf_vision import read_tower
from quire.config.hf_json import Fields, read_optional_json, shown
from quire.errors import ModelLoadError, UserError
from quire.multimodal.decoding import Pixels
from quire.utils.model_files import file_bytes

Patches = npt.NDArray[np.float32]
"""[patches, values of a patch], contiguous."""
BILINEAR, BICUBIC = 2, 3
"""Numbers of filters in Pillow and configuration files."""
LARGEST_RATIO = 200
"""Maximum ratio of an image's sides."""
MAX_SIDE = 2**16
"""Maximum side of a processed image in pixels."""
PATCH_AXES = 1, 4, 2, 5, 7, 0, 3, 6
"""Order of [frames, rows of tokens, of a token, of a patch, columns likewise, channels] in a tower's input."""
_FILE, _JOINT_FILE, _IMAGES = "preprocessor_config.json", "processor_config.json", "image_processor"
_KEY_LABEL = b"quire.image.v1\0"


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """Image between resizing and patches. pixels: resized; of a video's part [frames, height, width, 3]. grid: frames,
    rows and columns of patches. num_tokens: placeholders in a prompt. key: SHA-256 of pixels, size, grid and processor
    options."""

    pixels: Pixels
    grid: tuple[int, int, int]
    num_tokens: int
    key: bytes


@dataclass(frozen=True)
class Normalisation:
    """(value * factor - mean) / deviation per channel, with Transformers' precisions: product in float64, rest in
    float32. factor, mean, deviation: None skips the step."""

    factor: float | None
    mean: tuple[float, float, float] | None
    deviation: tuple[float, float, float] | None

    @cached_property
    def table(self) -> npt.NDArray[np.float32]:
        """Results [3, 256] for each channel and byte value."""
        values = np.arange(256, dtype=np.uint8)
        scaled = values.astype(np.float64) * (1.0 if self.factor is None else self.factor)
        rows = np.repeat(scaled.astype(np.float32)[None], 3, axis=0)
        if self.mean is not None and self.deviation is not None:
            mean, deviation = (np.array(each, np.float32)[:, None] for each in (self.mean, self.deviation))
            rows = (rows - mean) / deviation
        return rows


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """Vision tower's input from bytes. pixels: reshaped to `shape`, then in the order PATCH_AXES, where patches of a
    token are adjacent. repeats: of each frame. table: [3, 256], a byte's value by channel."""

    pixels: Pixels
    shape: tuple[int, ...]
    repeats: int
    table: npt.NDArray[np.float32]

    def patches(self) -> Patches:
        values = self.pixels.reshape(self.shape).transpose(PATCH_AXES)
        found = np.empty((*values.shape[:5], self.repeats * values.shape[5], *values.shape[6:]), np.float32)
        for channel, table in enumerate(self.table):
            found[:, :, :, :, channel] = table[values[:, :, :, :, channel]]
        return found.reshape(math.prod(values.shape[:4]), -1)


class ImageProcessor(Protocol):
    """Processor of one checkpoint; sendable to any process. merge_size: patches on each side of a token."""

    @property
    def merge_size(self) -> int: ...

    @property
    def max_tokens(self) -> int:
        """Approximate placeholders of the largest image, for estimates."""
        ...

    @property
    def is_whole(self) -> bool:
        """See ReadyImage."""
        ...

    def target_size(self, height: int, width: int, where: str) -> tuple[int, int]:
        """Resized height and width. Raises UserError for an image that the processor refuses."""
        ...

    def num_tokens_of(self, height: int, width: int, where: str) -> int:
        """Placeholders of an image, as `target_size` resizes it."""
        ...

    def process(self, pixels: Pixels, where: str) -> ProcessedImage:
        """Resize an image. Raises UserError as `target_size` does."""
        ...

    def layout(self, image: ProcessedImage) -> PatchLayout:
        """Where a patch's values lie in an image."""
        ...


class QwenProcessor(msgspec.Struct, frozen=True, tag=True):
    """Processor of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: sides are multiples of a token's, pixels are bounded. Each patch
    repeats the image `frames` times."""

    patch_size: int
    merge_size: int
    frames: int
    min_pixels: int
    max_pixels: int
    resample: int
    resizes: bool
    normalisation: Normalisation

    @property
    def is_whole(self) -> bool:
        return False

    @property
    def max_tokens(self) -> int:
        # Second term: a single row of tokens at the largest aspect ratio.
        side = self.patch_size * self.merge_size
        return max(self.max_pixels // side**2, math.ceil(math.sqrt(self.max_pixels * LARGEST_RATIO) / side)) + 1

    def target_size(self, height: int, width: int, where: str) -> tuple[int, int]:
        side = self.patch_size * self.merge_size
        if not self.resizes:
            if height % side or width % side:
                raise UserError(
                    f"{where}: the model resizes no images; {width} x {height} are not multiples of {side}", param=where
                )
            return height, width
        if max(height, width) > LARGEST_RATIO * min(height, width):
            raise UserError(
                f"{where}: an image of {width} x {height} pixels is more than {LARGEST_RATIO} times as long as wide",
                param=where,
            )
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > self.max_pixels:
            stretch = math.sqrt((height * width) / self.max_pixels)
            rows = max(1, math.floor(height / stretch / side))
            columns = max(1, math.floor(width / stretch / side))
        elif rows * columns * side * side < self.min_pixels:
            stretch = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * stretch / side), math.ceil(width * stretch / side)
        return rows * side, columns * side

    def num_tokens_of(self, height: int, width: int, where: str) -> int:
        return math.prod(self.target_size(height, width, where)) // (self.patch_size * self.merge_size) ** 2

    def process(self, pixels: Pixels, where: str) -> ProcessedImage:
        height, width = self.target_size(pixels.shape[0], pixels.shape[1], where)
        resized = resize(pixels, height, width, self.resample)
        grid = (1, height // self.patch_size, width // self.patch_size)
        num_tokens = grid[1] * grid[2] // self.merge_size**2
        return ProcessedImage(resized, grid, num_tokens, content_key(resized, grid, self))

    def layout(self, image: ProcessedImage) -> PatchLayout:
        _, rows, columns = image.grid
        merge, size = self.merge_size, self.patch_size
        count = 1 if image.pixels.ndim == 3 else self.frames  # an image is repeated
        shape = count, rows // merge, merge, size, columns // merge, merge, size, 3
        return PatchLayout(image.pixels, shape, self.frames // count, self.normalisation.table)


class SquareProcessor(msgspec.Struct, frozen=True, tag=True):
    """Processor of Gemma 3: all images get one size and number of tokens."""

    height: int
    width: int
    patch_size: int
    num_tokens: int
    resample: int
    normalisation: Normalisation

    @property
    def is_whole(self) -> bool:
        return True

    @property
    def merge_size(self) -> int:
        return self.height // self.patch_size // math.isqrt(self.num_tokens)

    @property
    def max_tokens(self) -> int:
        return self.num_tokens

    def target_size(self, height: int, width: int, where: str) -> tuple[int, int]:
        return self.height, self.width

    def num_tokens_of(self, height: int, width: int, where: str) -> int:
        return self.num_tokens

    def process(self, pixels: Pixels, where: str) -> ProcessedImage:
        resized = resize(pixels, self.height, self.width, self.resample)
        grid = (1, self.height // self.patch_size, self.width // self.patch_size)
        return ProcessedImage(resized, grid, self.num_tokens, content_key(resized, grid, self))

    def layout(self, image: ProcessedImage) -> PatchLayout:
        _, rows, columns = image.grid
        size, merge = self.patch_size, self.merge_size
        # Columns and rows after the last whole patch are dropped, as by a convolution.
        pixels = image.pixels[: rows * size, : columns * size][None]
        shape = 1, rows // merge, merge, size, columns // merge, merge, size, 3
        return PatchLayout(pixels, shape, 1, self.normalisation.table)


def resize(pixels: Pixels, height: int, width: int, resample: int) -> Pixels:
    """Resize an image with one of Pillow's filters. Equal sizes return it unchanged."""
    from PIL import Image

    if pixels.shape[:2] == (height, width):
        return pixels
    resized = Image.fromarray(pixels).resize((width, height), resample=Image.Resampling(resample))
    return np.array(resized)


def content_key(pixels: Pixels, grid: Sequence[int], options: object) -> bytes:
    """Key of a ProcessedImage. options: value whose repr names all that patches depend on."""
    described = repr((pixels.shape, tuple(grid), options)).encode()
    digest = hashlib.sha256(_KEY_LABEL + len(described).to_bytes(4, "little") + described)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()


def has_settings(directory: Path) -> bool:
    """True if a checkpoint has an image processor's settings. directory: or a vision tower's GGUF file."""
    return (
        directory.is_file()
        or file_bytes(directory / _FILE) is not None
        or _IMAGES in read_optional_json(directory / _JOINT_FILE)
    )


def read_qwen_processor(directory: Path) -> QwenProcessor:
    """Read the processor of Qwen2-VL, Qwen2.5-VL or Qwen3-VL. Raises ModelLoadError with file and key."""
    fields = _read_settings(directory)
    size = _object(fields, "size")
    usual = (None, None) if size.values else (56 * 56, 28 * 28 * 1280)
    # Older files have the limits beside `size`; those take precedence.
    least = fields.optional_integer("min_pixels") or size.integer("shortest_edge", usual[0])
    most = fields.optional_integer("max_pixels") or size.integer("longest_edge", usual[1])
    processor = QwenProcessor(
        patch_size=fields.integer("patch_size", 14, maximum=MAX_SIDE),
        merge_size=fields.integer("merge_size", 2, maximum=64),
        frames=fields.integer("temporal_patch_size", 2, maximum=64),
        min_pixels=least,
        max_pixels=most,
        resample=_resample(fields, BICUBIC),
        resizes=fields.boolean("do_resize", True),
        normalisation=_normalisation(fields, _CLIP_MEAN, _CLIP_DEVIATION),
    )
    if least > most:
        raise fields.error(f"size: shortest_edge ({least} pixels) is over longest_edge ({most})")
    if most > MAX_SIDE**2:
        raise fields.error(f"size: longest_edge must be at most {MAX_SIDE**2} pixels, not {most}")
    return processor


def read_square_processor(directory: Path, patch_size: int, side: int, num_tokens: int) -> SquareProcessor:
    """Read the processor of Gemma 3. side: patches on a side of an image. Raises ModelLoadError with file and key."""
    fields = _read_settings(directory)
    size = _object(fields, "size")
    if fields.values.get("do_pan_and_scan"):
        raise fields.error("do_pan_and_scan, which adds parts of a picture as pictures, is not supported")
    if not fields.boolean("do_resize", True):
        raise fields.error("do_resize false is not supported: all pictures of this model have one size")
    height, width = (size.integer(key, 224, maximum=MAX_SIDE) for key in ("height", "width"))
    if {height // patch_size, width // patch_size} != {side}:
        raise fields.error(
            f"size: {height} x {width} pixels must have {side} x {side} patches of {patch_size}, as in config.json"
        )
    return SquareProcessor(
        height,
        width,
        patch_size,
        num_tokens,
        _resample(fields, BILINEAR),
        _normalisation(fields, (0.5,) * 3, (0.5,) * 3),
    )


_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)


def _read_settings(directory: Path) -> Fields:
    if directory.is_file():
        return Fields(read_tower(directory).processor, str(directory))
    path = directory / _JOINT_FILE
    values = read_optional_json(path).get(_IMAGES)
    where = f"{path}: {_IMAGES}"
    if values is None:
        path = directory / _FILE
        where, values = str(path), read_optional_json(path)
    if not values:
        raise ModelLoadError(f"{directory} has no {_FILE}, which says how the model takes images")
    if not isinstance(values, dict):
        raise ModelLoadError(f"{where} must be an object, not {shown(values)}")
    fields = Fields(values, where)
    if not fields.boolean("do_convert_rgb", True):
        raise fields.error("do_convert_rgb false is not supported: pictures have red, green and blue")
    return fields


def _object(fields: Fields, key: str) -> Fields:
    values = fields.values.get(key) or {}
    if not isinstance(values, dict):
        raise fields.error(f"{key} must be an object, not {shown(values)}")
    return Fields(values, f"{fields.where}: {key}")


def _resample(fields: Fields, usual: int) -> int:
    number = fields.integer("resample", usual, minimum=0)
    if number > 5:
        raise fields.error(f"resample {number} is no filter of Pillow's")
    return number


def _normalisation(fields: Fields, mean: Sequence[float], deviation: Sequence[float]) -> Normalisation:
    factor = fields.number("rescale_factor", 1 / 255) if fields.boolean("do_rescale", True) else None
    if not fields.boolean("do_normalize", True):
        return Normalisation(factor, None, None)
    return Normalisation(factor, channels(fields, "image_mean", mean), channels(fields, "image_std", deviation, 0.0))


def channels(fields: Fields, key: str, usual: Sequence[float], above: float = -math.inf) -> tuple[float, float, float]:
    value = fields.values.get(key)
    numbers = usual if value is None else [value] * 3 if isinstance(value, int | float) else value
    is_list = isinstance(numbers, list | tuple) and len(numbers) == 3
    if not is_list or not all(type(each) in (int, float) and above < each < math.inf for each in numbers):
        raise fields.error(f"{key} must be a number for each of three channels, not {shown(value)}")
    red, green, blue = numbers
    return red, green, blue
