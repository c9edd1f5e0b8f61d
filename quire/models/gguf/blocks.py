"""The block formats of GGUF that hold integers, taken apart into these, scales and offsets. Exact: w = scale * value +
offset.

Each function takes the bytes of whole blocks and returns what one block holds, in the order of the row:

    blocks [n, bytes of a block] uint8 -> values [n, V] (int8, or uint8 for four bits), scales [n, V / group] float32,
    offsets likewise or None

Half-precision numbers become float32; products of a block's scale with the six or eight bits of a group's are exact
in float32, so these scales and offsets are the format's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from quire.quantization.block_weight import BlockFormatName

Bytes = npt.NDArray[np.uint8]
_LOW_HALVES, _HALF_BITS = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4)
Parts = tuple[npt.NDArray[Any], npt.NDArray[np.float32], npt.NDArray[np.float32] | None]


@dataclass(frozen=True)
class BlockFormat:
    """bits, group_size, has_offsets: of the integer weight that the blocks become. has_half_scales: the blocks store
    each group's scale and offset as such, in half precision; those of the others are products, which need float32.
    halves: the bytes at which a block has half-precision numbers. unpack: see the module's first lines."""

    bits: int
    group_size: int
    unpack: Callable[[Bytes], Parts]
    has_offsets: bool = False
    has_half_scales: bool = False
    halves: tuple[int, ...] = (0,)


def _q8_0(blocks: Bytes) -> Parts:
    """Scale, 32 signed bytes."""
    return _side_by_side(blocks[:, 2:]).view(np.int8), _halves(blocks, 0), None


def _q4_0(blocks: Bytes) -> Parts:
    """Scale, 16 bytes: values 0 to 15 in their low halves, 16 to 31 in their high halves, all 8 too large."""
    scales = _halves(blocks, 0)
    return _split_halves(blocks[:, 2:]), scales, np.float32(-8) * scales


def _q4_1(blocks: Bytes) -> Parts:
    """Scale, offset, and 16 bytes as in Q4_0."""
    return _split_halves(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: Bytes) -> Parts:
    """Scale, the fifth bits of the 32 values, and the others as in Q4_0, all 16 too large."""
    return _five_bits(blocks[:, 2:6], blocks[:, 6:]) - np.int8(16), _halves(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    """Scale, offset, and the values as in Q5_0."""
    return _five_bits(blocks[:, 4:8], blocks[:, 8:]), _halves(blocks, 0), _halves(blocks, 2)


def _q2_k(blocks: Bytes) -> Parts:
    """16 groups of 16: a byte for each with four bits of scale below four of subtrahend, 64 bytes of values, and the
    halves that all scales and all subtrahends are multiplied by. Each half of the values has 32 of the bytes, its
    quarters two bits after another of them."""
    grid = blocks[:, :16]
    scales, offsets = _halves(blocks, 80) * (grid & 15), -_halves(blocks, 82) * (grid >> 4)
    return _quarters(blocks[:, 16:80]), scales, offsets


def _q3_k(blocks: Bytes) -> Parts:
    """16 groups of 16. 32 bytes of third bits (bit r of byte i is that of value i of run r of 32), 64 bytes of lower
    two bits as in Q2_K, 12 bytes of scales in six bits, 32 too large, and a half. Values are 4 too large.

    The scales' lower four bits are the low and then the high halves of eight bytes, the upper two are in the last four:
    those of four groups after another in two bits after another.
    """
    runs = np.arange(8, dtype=np.uint8)[:, None]
    third = (blocks[:, None, :32] >> runs & 1).reshape(-1, 256)
    values = (_quarters(blocks[:, 32:96]) | third << 2).view(np.int8) - np.int8(4)
    upper = (blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = (_split_halves(blocks[:, 96:104]) | upper << 4).view(np.int8) - np.int8(32)
    return values, _halves(blocks, 108) * scales, None


def _iq4_nl(blocks: Bytes) -> Parts:
    """Scale, and 16 bytes as in Q4_0 of places in a table of values."""
    return NONLINEAR[_split_halves(blocks[:, 2:])], _halves(blocks, 0), None


def _q4_k(blocks: Bytes) -> Parts:
    """Eight groups of 32. Scales and offsets as `_group_grid` says, and 128 bytes: in each run of 32, one group in the
    low halves and the next in the high halves."""
    scales, offsets = _group_grid(blocks)
    return _runs(blocks[:, 16:]), scales, offsets


def _q5_k(blocks: Bytes) -> Parts:
    """As Q4_K, with 32 bytes between: bit g of byte i is the fifth bit of value i of group g."""
    scales, offsets = _group_grid(blocks)
    groups = np.arange(8, dtype=np.uint8)[:, None]
    fifth = blocks[:, 16:48].reshape(-1, 1, 32) >> groups & 1
    values = _runs(blocks[:, 48:]) | fifth.reshape(-1, 256) << 4
    return values.view(np.int8), scales, offsets


def _q6_k(blocks: Bytes) -> Parts:
    """16 groups of 16. 128 bytes of lower four bits, 64 of upper two, a signed byte for each group, and a scale. Values
    are 32 too large.

    Each half of the 256 values has 64 of the lower and 32 of the upper bytes: its values 0 to 63 are in the low halves
    of the former, 64 to 127 in the high halves; its quarters take two bits after another of the latter.
    """
    count = len(blocks)
    lower = blocks[:, :128].reshape(count, 2, 1, 64)
    lower = np.concatenate((lower & 15, lower >> 4), axis=2).reshape(count, 2, 4, 32)
    upper = blocks[:, 128:192].reshape(count, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3
    values = (lower | upper << 4).reshape(count, 256).view(np.int8) - np.int8(32)
    return values, blocks[:, 192:208].view(np.int8) * _halves(blocks, 208), None


def _quarters(packed: Bytes) -> Bytes:
    """[n, 64] -> [n, 256]: of each 32 bytes the lowest two bits, then the next two, and so on."""
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return (packed.reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)).reshape(-1, 256)


def _halves(blocks: Bytes, start: int) -> npt.NDArray[np.float32]:
    """[n, 1]: the half-precision number at byte `start` of each block."""
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def _split_halves(packed: Bytes) -> Bytes:
    """[n, w] -> [n, 2 w], w a multiple of 8: the low halves of all bytes, then the high halves."""
    words = packed.view("<u8")
    count, width = words.shape
    out = np.empty((count, 2 * width), dtype="<u8")
    for column in range(width):  # long loops over blocks, not a short one in each
        word = words[:, column]
        np.bitwise_and(word, _LOW_HALVES, out=out[:, column])
        np.bitwise_and(word >> _HALF_BITS, _LOW_HALVES, out=out[:, width + column])
    return out.view(np.uint8)


def _side_by_side(packed: Bytes) -> Bytes:
    """[n, w], w a multiple of 8 -> the same in one piece."""
    words = packed.view("<u8")
    out = np.empty(words.shape, dtype="<u8")
    for column in range(words.shape[1]):
        out[:, column] = words[:, column]
    return out.view(np.uint8)


def _five_bits(fifth: Bytes, packed: Bytes) -> npt.NDArray[np.int8]:
    """32 values from their fifth bits ([n, 4], lowest first) and the other four ([n, 16]) -> [n, 32]."""
    bits = np.unpackbits(np.ascontiguousarray(fifth), axis=1, bitorder="little")
    return (_split_halves(packed) | bits << 4).view(np.int8)


def _runs(packed: Bytes) -> Bytes:
    """[n, 128] -> [n, 256]: of each 32 bytes the low halves, then the high halves."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate((runs & 15, runs >> 4), axis=2).reshape(-1, 256)


def _group_grid(blocks: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scales and offsets of eight groups: two halves, by which all scales and all subtrahends are multiplied, and 12
    bytes with six bits of each for each group.

    Of the 12 bytes, four have the scales of groups 0 to 3 and four their subtrahends, in six bits; the last four have
    the lower four bits of both for groups 4 to 7, whose upper two bits are on top of the first eight bytes.
    """
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, (last & 15) | first >> 6 << 4), axis=1)
    subtrahends = np.concatenate((second & 63, last >> 4 | second >> 6 << 4), axis=1)
    return _halves(blocks, 0) * scales, -_halves(blocks, 2) * subtrahends


WHOLE_BLOCKS: tuple[BlockFormatName, ...] = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4"
)  # fmt: skip
"""Types of blocks that packed matrices hold as they are."""
NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)
FORMATS: Mapping[str, BlockFormat] = {
    "Q4_0": BlockFormat(4, 32, _q4_0, has_offsets=True, has_half_scales=True),
    "Q4_1": BlockFormat(4, 32, _q4_1, has_offsets=True, has_half_scales=True, halves=(0, 2)),
    "Q5_0": BlockFormat(8, 32, _q5_0, has_half_scales=True),
    "Q5_1": BlockFormat(8, 32, _q5_1, has_offsets=True, has_half_scales=True, halves=(0, 2)),
    "Q8_0": BlockFormat(8, 32, _q8_0, has_half_scales=True),
    "Q2_K": BlockFormat(4, 16, _q2_k, has_offsets=True, halves=(80, 82)),
    "Q3_K": BlockFormat(8, 16, _q3_k, halves=(108,)),
    "Q4_K": BlockFormat(4, 32, _q4_k, has_offsets=True, halves=(0, 2)),
    "Q5_K": BlockFormat(8, 32, _q5_k, has_offsets=True, halves=(0, 2)),
    "Q6_K": BlockFormat(8, 16, _q6_k, halves=(208,)),
    "IQ4_NL": BlockFormat(8, 32, _iq4_nl, has_half_scales=True),
}
