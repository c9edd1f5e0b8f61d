"""Images of a step: encoded when a step first computes one of their tokens, and kept by content."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch

from quire.models.vision import VisionEncoder
from quire.multimodal.processors import ImageProcessor, ProcessedImage
from quire.prompt_image import PromptImage
from quire.step import StepPlan
from quire.worker.input_batch import InputBatch
from quire.worker.overlays import StepOverlay

CACHE_BYTES = 256 * 2**20
"""Bytes of features that are kept for later steps and requests."""


class ImageOverlays:
    """The OverlaySource of a model that takes images.

    An image's features are needed by every step that computes one of its tokens, and by no other: a prompt whose
    images are in the prefix cache encodes none. Features are kept up to `cache_bytes`, those that were used last. What
    a step needs is there while it runs, however large; what is dropped between two chunks of an image is encoded
    again, with the same bits, so that every step makes progress.
    """

    def __init__(self, encoder: VisionEncoder, processor: ImageProcessor, cache_bytes: int = CACHE_BYTES) -> None:
        self._encoder = encoder
        self._processor = processor
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        """By key, [tokens, feature_size] float32; the last one was used last."""
        self._shown: dict[int, list[PromptImage]] = {}
        """By sequence."""
        self.num_encoded = 0
        """Images that were encoded."""

    def of_step(self, plan: StepPlan, batch: InputBatch) -> StepOverlay | None:
        for seq_id in plan.released if self._shown else ():
            self._shown.pop(seq_id, None)
        for new in plan.new_sequences:
            if new.images:
                self._shown[new.seq_id] = new.images
        return self._overlay(plan, batch) if self._shown else None

    def weight_bytes(self) -> int:
        """Bytes of the tower's parameters as they are stored."""
        return self._encoder.weight_bytes()

    def working_bytes(self, max_tokens: int) -> int:
        """A generous estimate of what features and the encoder's working memory take at most, everything in float32.
        max_tokens: of a prompt, whose placeholders an image's are."""
        config = self._encoder.config
        tokens = min(max_tokens, self._processor.max_tokens)
        patches = tokens * config.merge_size**2
        per_patch = 10 * config.hidden_size + config.intermediate_size + config.patch_values + config.merged_size
        return self._cache_bytes + 4 * (2 * patches * per_patch + tokens * config.feature_size)

    def release_workspaces(self) -> None:
        """Free working memory, and drop all features."""
        self._kept.clear()
        self._encoder.release_workspaces()

    def _overlay(self, plan: StepPlan, batch: InputBatch) -> StepOverlay | None:
        rows: list[np.ndarray] = []
        parts: list[torch.Tensor] = []
        for index, seq_id in enumerate(plan.seq_ids):
            start, end = int(batch.starts[index]), int(batch.ends[index])
            first_row = int(batch.query_start[index])
            for image in self._shown.get(seq_id, ()):
                first, past = max(start, image.start), min(end, image.end)
                if first < past:
                    rows.append(np.arange(first_row + first - start, first_row + past - start))
                    parts.append(self._features(image)[first - image.start : past - image.start])
        if not rows:
            return None
        self._trim()
        embeddings, *behind = torch.cat(parts).split(self._encoder.config.output_size, dim=1)
        return StepOverlay(np.concatenate(rows), embeddings, dict(enumerate(behind)))

    def _features(self, image: PromptImage) -> torch.Tensor:
        """[tokens, feature_size] float32."""
        found = self._kept.get(image.key)
        if found is None:
            found = self._kept[image.key] = self._encode(image)
        self._kept.move_to_end(image.key)
        return found

    def _encode(self, image: PromptImage) -> torch.Tensor:
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(*image.size, 3)
        merge = self._encoder.config.merge_size
        frames, rows, columns = image.grid
        grid = frames, rows * merge, columns * merge
        patches = self._processor.patches(ProcessedImage(pixels, grid, image.num_tokens, image.key))
        (features,) = self._encoder.encode(torch.from_numpy(patches), [grid])
        self.num_encoded += 1
        return features

    def _trim(self) -> None:
        """Drop features beyond the budget, those that were used longest ago first."""
        total = sum(features.nbytes for features in self._kept.values())
        while total > self._cache_bytes:
            _, dropped = self._kept.popitem(last=False)
            total -= dropped.nbytes
