"""Positions that rotations take in prompts with images (M-RoPE): three of each token, of its frame, row and column.

Those of a token of text are equal. The tokens of an image have its first position plus their place in its grid, and
what follows an image goes on behind the longer of its sides. So the positions behind all images are those of the KV
cache's slots, moved by one number, the sequence's shift.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.request import PromptImage

ROTARY_POSITIONS = "rotary_positions"
"""The column of positions for rotations alone."""
ROTARY_AXES = (ROTARY_POSITIONS, "rotary_rows", "rotary_columns")
"""Columns of the three positions of a token, of a model that takes images."""


def rotary_shift(images: Sequence[PromptImage]) -> int:
    """How far positions are moved behind all images; at most 0 for images of one frame."""
    return sum(max(image.grid[1:]) - image.num_tokens for image in images)


def rotary_axes(images: Sequence[PromptImage]) -> npt.NDArray[np.int64]:
    """[3, tokens up to the end of the last image]. images: in the order of the prompt."""
    end = images[-1].end if images else 0
    found = np.repeat(np.arange(end)[None], 3, axis=0)
    shift = 0
    for image in images:
        first, past = image.start, image.end
        place = np.indices(image.grid).reshape(3, -1)
        found[:, first:past] = first + shift + place
        shift += max(image.grid[1:]) - image.num_tokens
        found[:, past:] = np.arange(past, end) + shift
    return found
