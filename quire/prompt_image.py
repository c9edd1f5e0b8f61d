"""Images of prompts, in requests and in plans."""

from __future__ import annotations

import msgspec


class ReadyImage(msgspec.Struct, frozen=True, array_like=True):
    """Decoded and resized image, or the features that a client computed of one."""

    grid: tuple[int, int, int]
    """Number of frames, rows and columns of tokens."""
    key: bytes
    """Identity of the content (quire/multimodal/processors.py)."""
    pixels: bytes
    """Resized picture, [height, width, 3] uint8, or the frames of a video's part, [frames, height, width, 3]; of an
    encoded image features, [tokens, feature size] float32."""
    size: tuple[int, int]
    """(height, width) in pixels; of an encoded image the shape of the features."""
    is_encoded: bool
    """True for features."""
    is_whole: bool
    """True if its tokens see one another, so one step computes them all."""

    @property
    def num_tokens(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def num_bytes(self) -> int:
        return len(self.pixels)

    def at(self, start: int, moment: int | None = None) -> PromptImage:
        return PromptImage(
            self.grid, self.key, self.pixels, self.size, self.is_encoded, self.is_whole, start=start, moment=moment
        )


class PromptImage(ReadyImage, frozen=True, array_like=True):
    """Image in a prompt, where a run of placeholder tokens stands for it."""

    start: int
    moment: int | None = None
    """Rotary time of a video's later part, which has the rows and columns of the first; None: own positions."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens
