"""An image in a prompt, as a request brings it and a plan hands it to the workers."""

from __future__ import annotations

import msgspec


class ReadyImage(msgspec.Struct, frozen=True, array_like=True):
    """An image as a model takes it, decoded and resized."""

    grid: tuple[int, int, int]
    """Frames, rows and columns of tokens."""
    key: bytes
    """What tells its content from that of others (quire/multimodal/processors.py)."""
    pixels: bytes
    """[height, width, 3] uint8, resized."""
    size: tuple[int, int]
    """Height and width."""

    @property
    def num_tokens(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns


class PromptImage(ReadyImage, frozen=True, array_like=True):
    """An image in a prompt: a run of placeholders stands for it."""

    start: int
    """Position of the first placeholder."""

    @property
    def end(self) -> int:
        """Position behind the last placeholder."""
        return self.start + self.num_tokens
