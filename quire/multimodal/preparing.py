"""From a picture to what a model takes of it, in any process: here, or in a helper that is given its file."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.multimodal.decoding import decode_image, read_pixels
from quire.multimodal.processors import QwenProcessor
from quire.multimodal.sources import read_data_url
from quire.prompt_image import ReadyImage

Color = tuple[int, int, int]


class Preparation(msgspec.Struct, frozen=True):
    """How pictures become ReadyImages. background: what transparent ones are laid over."""

    processor: QwenProcessor
    background: Color

    def prepare(self, image: Any, where: str) -> ReadyImage:
        """image: the bytes of a file, a data URL, a Pillow image or an array. where: the field's path, for errors.
        Raises UserError."""
        if isinstance(image, str):
            image = read_data_url(image, where)
        if isinstance(image, bytes):
            pixels = decode_image(image, where, background=self.background)
        else:
            pixels = read_pixels(image, where, background=self.background)
        found = self.processor.process(pixels, where)
        frames, rows, columns = found.grid
        merge = self.processor.merge_size
        grid = frames, rows // merge, columns // merge
        return ReadyImage(grid, found.key, found.pixels.tobytes(), found.pixels.shape[:2])


class FileJob(msgspec.Struct, frozen=True):
    """What a helper is told beside a picture's file."""

    how: Preparation
    where: str


def prepare_file(argument: str, data: bytes) -> bytes:
    """What a front end asks of a helper (quire/tokenization/helpers.py): msgpack of the ReadyImage. argument: JSON of a
    FileJob. Raises UserError."""
    job = msgspec.json.decode(argument, type=FileJob)
    return msgspec.msgpack.encode(job.how.prepare(data, job.where))
