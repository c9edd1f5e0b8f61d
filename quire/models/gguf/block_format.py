"""Common parts of GGUF's block formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Parts = tuple[npt.NDArray[Any], Floats, Floats | None]
"""Values, scales, offsets."""
_LOW_HALVES, _HALF_BITS = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4)


@dataclass(frozen=True)
class BlockFormat:
    """One block format. bits, group_size, has_offsets: the integer weight made from it. has_half_scales: True if blocks
    store each group's scale and offset in half precision; in other formats these are products, which need float32.
    half_places: byte positions of half-precision numbers in a block packed as it is. unpack: see
    `quire.models.gguf.blocks`."""

    bits: int
    group_size: int
    unpack: Callable[[Bytes], Parts]
    has_offsets: bool = False
    has_half_scales: bool = False
    half_places: tuple[int, ...] = (0,)


def halves(blocks: Bytes, start: int) -> Floats:
    """[n, 1]: half-precision number at byte `start` of each block."""
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def split_halves(packed: Bytes) -> Bytes:
    """[n, w] -> [n, 2 w], w a multiple of 8: low nibbles of all bytes, then high ones."""
    words = packed.view("<u8")
    count, width = words.shape
    out = np.empty((count, 2 * width), dtype="<u8")
    for column in range(width):  # one long NumPy loop over all blocks per column
        word = words[:, column]
        np.bitwise_and(word, _LOW_HALVES, out=out[:, column])
        np.bitwise_and(word >> _HALF_BITS, _LOW_HALVES, out=out[:, width + column])
    return out.view(np.uint8)
