"""Images of a step: encoding as plans order, and overlays over their tokens' embeddings."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch

from quire.image_orders import ImageOrders, ImagePlace
from quire.models.vision import EncoderRun, VisionEncoder
from quire.models.vision_grid import copied_to
from quire.multimodal.processors import PATCH_AXES, ImageProcessor, PatchLayout, ProcessedImage
from quire.parallel.interface import ProcessGroup
from quire.parallel.single import SINGLE_RANK
from quire.prompt_image import PromptImage
from quire.step import StepPlan
from quire.worker.input_batch import InputBatch
from quire.worker.overlays import StepOverlay


@dataclass(slots=True)
class PartlyEncoded:
    """Image that a rank has begun. num_left: layers left. run: on that rank alone."""

    rank: int
    num_tokens: int
    num_left: int
    run: EncoderRun | None


class ImageOverlays:
    """OverlaySource of a model with images. Plans order encoding and dropping, so the scheduler knows every worker's
    features (quire/scheduler/encoding.py). An image's bits do not depend on how its encoding is sliced."""

    def __init__(
        self, encoder: VisionEncoder, processor: ImageProcessor, largest_tokens: int, group: ProcessGroup = SINGLE_RANK
    ) -> None:
        """largest_tokens: see ImageInputs. group: ranks, each of which encodes images of its own."""
        self.encoder = encoder
        self._processor = processor
        self._largest_tokens = largest_tokens
        self._group = group
        self._kept: dict[bytes, torch.Tensor] = {}
        """Features by image key, [tokens, feature_size] float32."""
        self._partly: dict[bytes, PartlyEncoded] = {}
        """Images that ranks have begun, at most one a rank."""
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
        """Upper estimate in bytes of features and the encoder's working memory. max_tokens: limit of a prompt."""
        return self.encoder.config.working_bytes(min(max_tokens, self._largest_tokens))

    def release_workspaces(self) -> None:
        """Free working memory and forget all features and sequences, for a sleep."""
        self._shown.clear()
        self._kept.clear()
        self._partly.clear()
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
            self._partly.pop(key, None)
        encoded: list[tuple[bytes, PartlyEncoded, torch.Tensor | None]] = []
        for part in orders.slices:
            if part.image is not None and part.image.is_encoded:
                given = np.frombuffer(part.image.pixels, np.float32).reshape(part.image.size)
                self._kept[part.key] = copied_to(torch.from_numpy(given.copy()), self.encoder.device)
                continue
            if part.image is not None:
                busy = [each.rank for each in self._partly.values()]
                assert part.rank not in busy, "a rank encodes one image at a time"
                run = self._begin(part.image) if part.rank == self._group.rank else None
                self._partly[part.key] = PartlyEncoded(
                    part.rank, part.image.num_tokens, self.encoder.config.num_layers, run
                )
            image = self._partly[part.key]  # the first layers bring it
            image.num_left -= part.num_layers
            features = None if image.run is None else image.run.advance(part.num_layers)
            if not image.num_left:
                encoded.append((part.key, self._partly.pop(part.key), None if features is None else features[0]))
        for key, image, own in encoded:  # after all slices, so that ranks compute side by side
            self._kept[key] = self._exchanged(image, own)

    def _exchanged(self, image: PartlyEncoded, own: torch.Tensor | None) -> torch.Tensor:
        """Features of an image on every rank. own: None on those that did not encode it."""
        if own is None:
            shape = image.num_tokens, self.encoder.config.feature_size
            own = torch.empty(shape, dtype=torch.float32, device=self.encoder.device)
        return self._group.broadcast(own, image.rank)

    def _begin(self, image: PromptImage) -> EncoderRun:
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(-1, *image.size, 3)
        pixels = pixels[0] if len(pixels) == 1 else pixels  # of a video's part several
        merge = self.encoder.config.merge_size
        frames, rows, columns = image.grid
        grid = frames, rows * merge, columns * merge
        layout = self._processor.layout(ProcessedImage(pixels, grid, image.num_tokens, image.key))
        return self.encoder.begin_run(patches_on(layout, self.encoder.device), [grid])


def patches_on(layout: PatchLayout, device: torch.device) -> torch.Tensor:
    """`PatchLayout.patches` on a device, which gets bytes, an eighth of the values of a repeated frame."""
    return torch.from_numpy(layout.patches()) if device.type == "cpu" else device_patches(layout, device)


def device_patches(layout: PatchLayout, device: torch.device) -> torch.Tensor:
    pixels = copied_to(torch.from_numpy(np.ascontiguousarray(layout.pixels)), device)
    values = pixels.reshape(layout.shape).permute(PATCH_AXES)
    table = copied_to(torch.from_numpy(layout.table), device)
    channels = [table[channel][values[:, :, :, :, channel].int()] for channel in range(3)]
    found = torch.stack(channels, 4).expand(*(-1,) * 5, layout.repeats * values.shape[5], -1, -1)
    return found.reshape(math.prod(values.shape[:4]), -1)
