"""Rotary positions in prompts with images (M-RoPE): frame, row and column of each token.

A text token has three equal positions; an image's tokens the first position plus their place in its grid; a video's
parts (`PromptImage.moment`) the first's rows and columns. Text continues behind the largest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from quire.config.adapters import ADAPTER_SLOTS
from quire.image_orders import ImagePlace
from quire.kv_cache.block_hash import placed_key
from quire.prompt_image import PromptImage
from quire.step import TokenValues

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LAST_SEEN = "last_seen"
"""Step column where images' tokens see one another: position of the last token that each sees."""
ROTARY_COLUMNS = ROTARY_POSITIONS, *GRID_POSITIONS = "rotary_positions", "rotary_heights", "rotary_widths"


def image_keys(images: Sequence[PromptImage], block_size: int) -> Iterator[tuple[int, bytes]]:
    """Yield (block, key), for block hashes, of each prefix-cache block with image placeholders: the image's content,
    its place in the block, and its time in a video."""
    for image in images:
        for block in range(image.start // block_size, (image.end - 1) // block_size + 1):
            time = b"" if image.moment is None else struct.pack("<q", image.moment)
            yield block, placed_key(image.start - block * block_size, image.key + time)


def add_image_keys(
    keys: MutableMapping[int, tuple[bytes, ...]], images: Sequence[PromptImage], block_size: int
) -> None:
    for block, key in image_keys(images, block_size):
        keys[block] = (*keys.get(block, ()), key)


def rotary_shift(images: Sequence[PromptImage]) -> int:
    """Positions (rotary minus plain) added after all images: below 0 unless a video's times outgrow its tokens."""
    shifts = [shift for _, _, shift in _bases(images)]
    return shifts[-1] if shifts else 0


def _bases(images: Sequence[PromptImage]) -> Iterator[tuple[PromptImage, int, int]]:
    """Yield each image, its first position, and the shift of positions after it."""
    base = shift = 0
    for image in images:
        if image.moment is None:
            base = image.start + shift
        frames, rows, columns = image.grid
        shift = base + max((image.moment or 0) + frames, rows, columns) - image.end
        yield image, base, shift


def with_positions(
    images: Sequence[PromptImage], columns: Mapping[str, int], token_columns: Mapping[str, TokenValues]
) -> tuple[dict[str, int], dict[str, TokenValues]]:
    """(columns, token columns) of a request, with its images' positions, for the scheduler's plan."""
    if not images:
        return dict(columns), dict(token_columns)
    if images[0].is_whole:
        return dict(columns), {**token_columns, LAST_SEEN: last_seen(images)}
    shift = dict.fromkeys(ROTARY_COLUMNS, rotary_shift(images))
    return {**columns, **shift}, {**token_columns, **rotary_values(images)}


class Placed(Protocol):
    """Request, as `row_fields` reads it."""

    images: list[PromptImage]
    columns: dict[str, int]
    token_columns: dict[str, TokenValues]
    adapter_slot: int


def row_fields(request: Placed) -> dict[str, Any]:
    """NewSequence fields with images and step columns, for the scheduler's plan."""
    columns, token_columns = with_positions(request.images, request.columns, request.token_columns)
    if request.adapter_slot:
        columns[ADAPTER_SLOTS] = request.adapter_slot
    places = [ImagePlace(image.key, image.start, image.end) for image in request.images]
    return {"columns": columns, "token_columns": token_columns, "images": places}


def rotary_values(images: Sequence[PromptImage]) -> Mapping[str, TokenValues]:
    """Positions of the tokens from the first image to the last's end, by column. images: at least one, in prompt
    order."""
    start = images[0].start
    return {
        name: TokenValues(start, values[start:].tolist())
        for name, values in zip(ROTARY_COLUMNS, rotary_positions(images), strict=True)
    }


def last_seen(images: Sequence[PromptImage]) -> TokenValues:
    """Values of the column LAST_SEEN, from the first image to the end of the last."""
    start = images[0].start
    values = list(range(start, images[-1].end))
    for image in images:
        values[image.start - start : image.end - start] = [image.end - 1] * image.num_tokens
    return TokenValues(start, values)


def rotary_positions(images: Sequence[PromptImage]) -> npt.NDArray[np.int64]:
    """Positions (time, height, width) [3, tokens up to the last image's end]."""
    import numpy as np  # the control plane imports this module but not NumPy

    end = images[-1].end
    found = np.repeat(np.arange(end)[None], 3, axis=0)
    for image, base, shift in _bases(images):
        first, past = image.start, image.end
        found[:, first:past] = base + np.indices(image.grid).reshape(3, -1)
        found[0, first:past] += image.moment or 0
        found[:, past:] = np.arange(past, end) + shift
    return found
