"""Images of prompts, in requests and in plans."""

from __future__ import annotations

import msgspec


class ReadyImage(msgspec.Struct, frozen=True, array_like=True):
    grid: tuple[int, int, int]
    """Number of frames, rows and columns of tokens."""
    key: bytes
    """Identity of the content (quire/multimodal/processors.py)."""
    pixels: bytes
    """Resized picture, [height, width, 3] uint8."""
    size: tuple[int, int]
    """(height, width) in pixels."""

    @property
    def num_tokens(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns


class PromptImage(ReadyImage, frozen=True, array_like=True):
    """An image in a prompt, where a run of placeholder tokens stands for it."""

    start: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens
