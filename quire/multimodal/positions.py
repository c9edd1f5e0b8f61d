"""Positions that rotations take in prompts with images (M-RoPE): three of each token, of its frame, row and column.

Those of a token of text are equal. The tokens of an image have its first position plus their place in its grid, and
what follows an image goes on behind the longer of its sides. So the positions behind all images are those of the KV
cache's slots, moved by one number, the sequence's shift.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from quire.config.adapters import ADAPTER_SLOTS
from quire.image_orders import ImagePlace
from quire.prompt_image import PromptImage
from quire.step import TokenValues

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ROTARY_COLUMNS = ROTARY_POSITIONS, *GRID_POSITIONS = "rotary_positions", "rotary_heights", "rotary_widths"
"""Columns of positions for rotations alone. The last two: rows and columns in the grid of an image's patches, which
models rotate some elements by (`mrope_section`); of text all three are the same."""


def image_keys(images: Sequence[PromptImage], block_size: int) -> Iterator[tuple[int, bytes]]:
    """(block, key) of each block of the prefix cache that has placeholders of an image: its content, and its place in
    the block. What is before an image depends on none, and the positions of tokens follow from the images before them:
    prompts of equal beginnings share these, whatever images follow."""
    for image in images:
        for block in range(image.start // block_size, (image.end - 1) // block_size + 1):
            yield block, b"image" + struct.pack("<q", image.start - block * block_size) + image.key


def add_image_keys(
    keys: MutableMapping[int, tuple[bytes, ...]], images: Sequence[PromptImage], block_size: int
) -> None:
    """Add `image_keys` to the other keys of the blocks."""
    for block, key in image_keys(images, block_size):
        keys[block] = (*keys.get(block, ()), key)


def rotary_shift(images: Sequence[PromptImage]) -> int:
    """How far positions are moved behind all images; at most 0 for images of one frame."""
    return sum(max(image.grid[1:]) - image.num_tokens for image in images)


def with_positions(
    images: Sequence[PromptImage], columns: Mapping[str, int], token_columns: Mapping[str, TokenValues]
) -> tuple[dict[str, int], dict[str, TokenValues]]:
    """The values of step columns that a sequence's row has, those of its request included."""
    if not images:
        return dict(columns), dict(token_columns)
    shift = dict.fromkeys(ROTARY_COLUMNS, rotary_shift(images))
    return {**columns, **shift}, {**token_columns, **rotary_values(images)}


class Placed(Protocol):
    """A request, as far as its row's values follow from it."""

    images: list[PromptImage]
    columns: dict[str, int]
    token_columns: dict[str, TokenValues]
    adapter_slot: int


def row_fields(request: Placed) -> dict[str, Any]:
    """The fields of NewSequence with the images and the values of step columns that a sequence's row has."""
    columns, token_columns = with_positions(request.images, request.columns, request.token_columns)
    if request.adapter_slot:
        columns[ADAPTER_SLOTS] = request.adapter_slot
    places = [ImagePlace(image.key, image.start, image.end) for image in request.images]
    return {"columns": columns, "token_columns": token_columns, "images": places}


def rotary_values(images: Sequence[PromptImage]) -> Mapping[str, TokenValues]:
    """The positions of the tokens from the first image to the end of the last, by column. images: in the order of the
    prompt, at least one."""
    start = images[0].start
    return {
        name: TokenValues(start, values[start:].tolist())
        for name, values in zip(ROTARY_COLUMNS, rotary_positions(images), strict=True)
    }


def rotary_positions(images: Sequence[PromptImage]) -> npt.NDArray[np.int64]:
    """[3, tokens up to the end of the last image]."""
    import numpy as np  # the control plane, which hashes images, loads none

    end = images[-1].end
    found = np.repeat(np.arange(end)[None], 3, axis=0)
    shift = 0
    for image in images:
        first, past = image.start, image.end
        found[:, first:past] = first + shift + np.indices(image.grid).reshape(3, -1)
        shift += max(image.grid[1:]) - image.num_tokens
        found[:, past:] = np.arange(past, end) + shift
    return found
