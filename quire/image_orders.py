"""Images as plans name them (quire/step.py)."""

from __future__ import annotations

import msgspec

from quire.prompt_image import PromptImage


class ImagePlace(msgspec.Struct, array_like=True, frozen=True):
    """Positions [start, end) of a sequence, whose embeddings are the features of the image of this key."""

    key: bytes
    start: int
    end: int


class EncodeSlice(msgspec.Struct, array_like=True, frozen=True):
    """The next layers of one image's encoding. The layers of an image are ordered one after the other, and those of
    another image begin behind its last."""

    key: bytes
    num_layers: int
    image: PromptImage | None
    """With the first layers."""


class ImageOrders(msgspec.Struct, array_like=True):
    """What a plan has the workers do with images, before it reads any."""

    dropped: list[bytes]
    """Forget these, encoded or not: first of all."""
    slices: list[EncodeSlice]
