"""Image orders in step plans (quire/step.py)."""

from __future__ import annotations

import msgspec

from quire.prompt_image import PromptImage


class ImagePlace(msgspec.Struct, array_like=True, frozen=True):
    """Positions [start, end) of a sequence that take the features of the image `key` as embeddings."""

    key: bytes
    start: int
    end: int


class EncodeSlice(msgspec.Struct, array_like=True, frozen=True):
    """Next layers of one image's encoding on one rank. An image's slices follow one another; the rank's next image
    begins after its last. After a plan's slices ranks exchange new features."""

    key: bytes
    num_layers: int
    image: PromptImage | None
    """Image to encode; set with the order for its first layers."""
    rank: int = 0


class ImageOrders(msgspec.Struct, array_like=True):
    """Image work of a step plan, which workers do before the model reads images."""

    dropped: list[bytes]
    """Keys of images to drop, encoded or not, before the slices."""
    slices: list[EncodeSlice]
