"""Images of prompts: what a model's checkpoint says of them, and how they take the places of placeholders.

What decodes and resizes them is imported where a model takes images: a server's processes load no NumPy else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config.engine import EngineConfig
from quire.config.hf_config import CONFIG_FILE
from quire.config.vision import VisionConfig, read_vision
from quire.errors import UserError
from quire.prompt_image import PromptImage

if TYPE_CHECKING:
    from quire.multimodal.processors import QwenProcessor

VISION_TOWERS = ("Qwen3VLForCausalLM", "Qwen3VLMoeForCausalLM")
"""Language models whose vision towers run."""
TEXT_ALONE = "prompts are text, without images, sound or video"
IMAGES = "multi_modal_data.image"
"""Path of a prompt's images, for errors."""


@dataclass(frozen=True)
class NoImages:
    """In the place of ImageInputs, for a model that is given no images. reason: why."""

    reason: str = TEXT_ALONE


@dataclass(frozen=True)
class ImageInputs:
    """How one model takes images. token_id: of placeholders."""

    processor: QwenProcessor
    vision: VisionConfig
    token_id: int

    def place(self, token_ids: list[int], images: Sequence[Any], where: str) -> tuple[list[int], list[PromptImage]]:
        """The prompt with a placeholder for each token of each image, and the images in their places. token_ids: with
        one placeholder for each image, or with all of them. images: Pillow images, arrays, bytes of files or data URLs.

        Raises UserError for images that cannot be taken, naming them by their path, and for placeholders that do not
        match."""
        processed = [
            self.processor.process(self._pixels(image, f"{where}[{index}]"), f"{where}[{index}]")
            for index, image in enumerate(images)
        ]
        runs = self._runs(token_ids)
        counts = [each.num_tokens for each in processed]
        found: list[PromptImage] = []
        if [end - start for start, end in runs] == counts:
            starts, placed = [start for start, _ in runs], token_ids
        else:
            places = [place for start, end in runs for place in range(start, end)]
            if len(places) != len(processed):
                raise UserError(
                    f"{where}: the prompt has {len(places)} placeholders (token {self.token_id}), and {len(processed)} "
                    f"images are given",
                    param=where,
                )
            starts, placed, last = [], [], 0
            for place, count in zip(places, counts, strict=True):
                placed += token_ids[last:place]
                starts.append(len(placed))
                placed += [self.token_id] * count
                last = place + 1
            placed += token_ids[last:]
        merge = self.processor.merge_size
        for start, each in zip(starts, processed, strict=True):
            frames, rows, columns = each.grid
            grid = frames, rows // merge, columns // merge
            found.append(PromptImage(start, grid, each.key, each.pixels.tobytes(), each.pixels.shape[:2]))
        return placed, found

    def _pixels(self, image: Any, where: str) -> Any:
        from quire.multimodal.decoding import decode_image, read_data_url, read_pixels

        if isinstance(image, str):
            image = read_data_url(image, where)
        if isinstance(image, bytes):
            return decode_image(image, where)
        return read_pixels(image, where)

    def _runs(self, token_ids: list[int]) -> list[tuple[int, int]]:
        """Where placeholders follow one another, [start, end) each."""
        runs: list[tuple[int, int]] = []
        start = -1
        for place, token_id in enumerate(token_ids):
            if token_id == self.token_id:
                start = place if start < 0 else start
            elif start >= 0:
                runs.append((start, place))
                start = -1
        if start >= 0:
            runs.append((start, len(token_ids)))
        return runs


def image_inputs(config: EngineConfig) -> ImageInputs | NoImages:
    """How the engine's model takes images; NoImages where it does not. Raises ModelLoadError for a checkpoint whose
    files about images are wrong."""
    model = config.model
    if model.vision is None or model.image_token_id is None or model.architecture not in VISION_TOWERS:
        return NoImages()
    if config.device.device != "cpu":
        return NoImages(f"images are computed on a CPU alone so far, and this engine runs on {config.device.device}")
    if config.parallel.devices_per_replica > 1:
        return NoImages("images are computed by one rank alone so far, and this engine has several")
    from quire.multimodal.processors import has_settings, read_qwen_processor

    if not has_settings(model.path):
        return NoImages(f"{model.path} has no preprocessor_config.json, which says how the model takes images")
    vision = read_vision(model.vision, model.hidden_size, str(model.path / CONFIG_FILE))
    return ImageInputs(read_qwen_processor(model.path), vision, model.image_token_id)


def images_of(data: object) -> list[Any]:
    """The images of a prompt's `multi_modal_data`: one, or a list of them. Raises UserError for anything else there."""
    if not isinstance(data, Mapping):
        raise UserError(f"multi_modal_data must be an object, not {type(data).__name__}", param="multi_modal_data")
    for name in data:
        if name != "image":
            raise UserError(
                f"multi_modal_data.{name!s:.50} is not supported: a prompt has images alone",
                param=f"multi_modal_data.{name!s:.50}",
            )
    images = data.get("image")
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]
