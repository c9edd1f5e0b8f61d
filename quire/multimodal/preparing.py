"""Preparation of an image, in this process or a helper."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.multimodal.decoding import decode_image, read_pixels
from quire.multimodal.processors import QwenProcessor, SquareProcessor
from quire.multimodal.sizes import NO_LIMIT, check_tokens
from quire.multimodal.sources import read_data_url
from quire.prompt_image import ReadyImage

Color = tuple[int, int, int]


class Preparation(msgspec.Struct, frozen=True):
    """Settings of one request that turn images into ReadyImages. background: colour under transparent pixels.
    most_tokens: limit of an image."""

    processor: QwenProcessor | SquareProcessor
    background: Color
    most_tokens: int = NO_LIMIT

    def prepare(self, image: Any, where: str) -> ReadyImage:
        """Decode, resize and key an image. image: bytes of a file, data URL, Pillow image or array. Raises
        UserError."""
        if isinstance(image, str):
            image = read_data_url(image, where)
        if isinstance(image, bytes):
            pixels = decode_image(image, where, background=self.background)
        else:
            pixels = read_pixels(image, where, background=self.background)
        if self.most_tokens < NO_LIMIT:
            height, width, _ = pixels.shape
            check_tokens(self.processor.num_tokens_of(height, width, where), self.most_tokens, "an image", where)
        found = self.processor.process(pixels, where)
        frames, rows, columns = found.grid
        merge = self.processor.merge_size
        grid = frames, rows // merge, columns // merge
        return ReadyImage(
            grid,
            found.key,
            found.pixels.tobytes(),
            found.pixels.shape[:2],
            is_encoded=False,
            is_whole=self.processor.is_whole,
        )


class FileJob(msgspec.Struct, frozen=True):
    """Argument of `prepare_file` besides the file."""

    how: Preparation
    where: str


def prepare_file(argument: str, data: bytes) -> bytes:
    """Prepare a file in a helper; return msgpack of the ReadyImage. argument: JSON of a FileJob. Raises UserError."""
    job = msgspec.json.decode(argument, type=FileJob)
    return msgspec.msgpack.encode(job.how.prepare(data, job.where))
