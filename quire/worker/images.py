"""Images of a step: encoding as plans order, and overlays over their tokens' embeddings."""

from __future__ import annotations

import time

import numpy as np
import torch

from quire.image_orders import ImageOrders, ImagePlace
from quire.models.vision import EncoderRun, VisionEncoder
from quire.models.vision_grid import copied_to
from quire.multimodal.processors import ImageProcessor, ProcessedImage
from quire.prompt_image import PromptImage
from quire.step import StepPlan
from quire.worker.input_batch import InputBatch
from quire.worker.overlays import StepOverlay


class ImageOverlays:
    """OverlaySource of a model with images. Plans order encoding and dropping, so the scheduler knows every worker's
    features (quire/scheduler/encoding.py). An image's bits do not depend on how its encoding is sliced."""

    def __init__(self, encoder: VisionEncoder, processor: ImageProcessor) -> None:
        self.encoder = encoder
        self._processor = processor
        self._kept: dict[bytes, torch.Tensor] = {}
        """Features by image key, [tokens, feature_size] float32."""
        self._run: tuple[bytes, EncoderRun] | None = None
        """Key and run of the partly encoded image."""
        self._seconds = 0.0
        self._shown: dict[int, list[ImagePlace]] = {}

    def of_step(self, plan: StepPlan, batch: InputBatch) -> StepOverlay | None:
        for seq_id in plan.released if self._shown else ():
            self._shown.pop(seq_id, None)
        for new in plan.new_sequences:
            if new.images:
                self._shown[new.seq_id] = new.images
        if plan.images is not None:
            since = time.perf_counter()
            self._follow(plan.images)
            self._seconds += time.perf_counter() - since
        return self._overlay(plan, batch) if self._shown else None

    def take_seconds(self) -> float:
        """Seconds spent encoding images since the last call, for StepResult."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def weight_bytes(self) -> int:
        return self.encoder.weight_bytes()

    def working_bytes(self, max_tokens: int) -> int:
        """Upper estimate in bytes of features and the encoder's working memory, in float32. max_tokens: limit of a
        prompt, which bounds an image's placeholders."""
        return self.encoder.config.working_bytes(min(max_tokens, self._processor.max_tokens))

    def release_workspaces(self) -> None:
        """Free working memory and drop all features, for a sleep."""
        self._kept.clear()
        self._run = None
        self.encoder.release_workspaces()

    def _overlay(self, plan: StepPlan, batch: InputBatch) -> StepOverlay | None:
        rows: list[np.ndarray] = []
        parts: list[torch.Tensor] = []
        for index, seq_id in enumerate(plan.seq_ids):
            start, end = int(batch.starts[index]), int(batch.ends[index])
            first_row = int(batch.query_start[index])
            images = self._shown.get(seq_id, ())
            if images and start >= images[-1].end:
                continue  # a video has hundreds of parts
            for image in images:
                first, past = max(start, image.start), min(end, image.end)
                if first < past:
                    rows.append(np.arange(first_row + first - start, first_row + past - start))
                    parts.append(self._kept[image.key][first - image.start : past - image.start])
        if not rows:
            return None
        embeddings, *behind = torch.cat(parts).split(self.encoder.config.output_size, dim=1)
        return StepOverlay(np.concatenate(rows), embeddings, dict(enumerate(behind)))

    def _follow(self, orders: ImageOrders) -> None:
        for key in orders.dropped:
            self._kept.pop(key, None)
            if self._run is not None and self._run[0] == key:
                self._run = None
        for part in orders.slices:
            if part.image is not None and part.image.is_encoded:
                given = np.frombuffer(part.image.pixels, np.float32).reshape(part.image.size)
                self._kept[part.key] = copied_to(torch.from_numpy(given.copy()), self.encoder.device)
                continue
            if part.image is not None:
                assert self._run is None, "one image is encoded at a time"
                self._run = part.key, self._begin(part.image)
            assert self._run is not None, "the first layers bring the image"
            assert self._run[0] == part.key, "an image's layers follow one another"
            features = self._run[1].advance(part.num_layers)
            if features is not None:
                (self._kept[part.key],), self._run = features, None

    def _begin(self, image: PromptImage) -> EncoderRun:
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(-1, *image.size, 3)
        pixels = pixels[0] if len(pixels) == 1 else pixels  # of a video's part several
        merge = self.encoder.config.merge_size
        frames, rows, columns = image.grid
        grid = frames, rows * merge, columns * merge
        patches = self._processor.patches(ProcessedImage(pixels, grid, image.num_tokens, image.key))
        return self.encoder.begin_run(torch.from_numpy(patches), [grid])
