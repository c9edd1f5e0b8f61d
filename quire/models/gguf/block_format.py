"""What the formats of GGUF's blocks have in common."""

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
    """bits, group_size, has_offsets: of the integer weight that the blocks become. has_half_scales: the blocks store
    each group's scale and offset as such, in half precision; those of the others are products, which need float32.
    half_places: the bytes at which a block has half-precision numbers, of formats that are packed as they are. unpack:
    takes whole blocks apart, as `quire.models.gguf.blocks` says."""

    bits: int
    group_size: int
    unpack: Callable[[Bytes], Parts]
    has_offsets: bool = False
    has_half_scales: bool = False
    half_places: tuple[int, ...] = (0,)


def halves(blocks: Bytes, start: int) -> Floats:
    """[n, 1]: the half-precision number at byte `start` of each block."""
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def split_halves(packed: Bytes) -> Bytes:
    """[n, w] -> [n, 2 w], w a multiple of 8: the low halves of all bytes, then the high halves."""
    words = packed.view("<u8")
    count, width = words.shape
    out = np.empty((count, 2 * width), dtype="<u8")
    for column in range(width):  # long loops over blocks, not a short one in each
        word = words[:, column]
        np.bitwise_and(word, _LOW_HALVES, out=out[:, column])
        np.bitwise_and(word >> _HALF_BITS, _LOW_HALVES, out=out[:, width + column])
    return out.view(np.uint8)
