"""Exact unpacking of GGUF's integer block formats: w = scale * value + offset.

Each function maps blocks [n, bytes of a block] uint8 -> values [n, V] (int8, or uint8 for four bits), scales [n, V /
group] float32, and offsets likewise or None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.models.gguf.block_format import BlockFormat, Bytes, Parts, halves, split_halves
from quire.models.gguf.grid_blocks import GRID_FORMATS, NONLINEAR

if TYPE_CHECKING:
    from quire.quantization.block_weight import BlockFormatName


def _q8_0(blocks: Bytes) -> Parts:
    """Parts from float16 scale and 32 signed bytes."""
    return _side_by_side(blocks[:, 2:]).view(np.int8), halves(blocks, 0), None


def _q4_0(blocks: Bytes) -> Parts:
    """Parts from scale and 16 bytes: values 0 to 15 in low nibbles, 16 to 31 in high ones, offset by 8."""
    scales = halves(blocks, 0)
    return split_halves(blocks[:, 2:]), scales, np.float32(-8) * scales


def _q4_1(blocks: Bytes) -> Parts:
    """Parts from scale, offset, and 16 bytes as in Q4_0."""
    return split_halves(blocks[:, 4:]), halves(blocks, 0), halves(blocks, 2)


def _q5_0(blocks: Bytes) -> Parts:
    """Parts from scale, 32 values' fifth bits, the others as in Q4_0, offset by 16."""
    return _five_bits(blocks[:, 2:6], blocks[:, 6:]) - np.int8(16), halves(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    """Parts from scale, offset, and values as in Q5_0."""
    return _five_bits(blocks[:, 4:8], blocks[:, 8:]), halves(blocks, 0), halves(blocks, 2)


def _q2_k(blocks: Bytes) -> Parts:
    """Parts from 16 groups of 16: one byte each, four bits of scale (low) and subtrahend (high), 64 bytes of bit pairs,
    and scales' and subtrahends' factors as halves."""
    grid = blocks[:, :16]
    scales, offsets = halves(blocks, 80) * (grid & 15), -halves(blocks, 82) * (grid >> 4)
    return _quarters(blocks[:, 16:80]), scales, offsets


def _q3_k(blocks: Bytes) -> Parts:
    """Parts from 16 groups of 16: 32 bytes of third bits, 64 of lower bit pairs as in Q2_K, 12 of six-bit scales offset
    by 32, and their float16 factor. Values are offset by 4."""
    runs = np.arange(8, dtype=np.uint8)[:, None]
    third = (blocks[:, None, :32] >> runs & 1).reshape(-1, 256)
    values = (_quarters(blocks[:, 32:96]) | third << 2).view(np.int8) - np.int8(4)
    upper = (blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = (split_halves(blocks[:, 96:104]) | upper << 4).view(np.int8) - np.int8(32)
    return values, halves(blocks, 108) * scales, None


def _iq4_nl(blocks: Bytes) -> Parts:
    """Parts from scale and 16 bytes as in Q4_0, indices of NONLINEAR."""
    return NONLINEAR[split_halves(blocks[:, 2:])], halves(blocks, 0), None


def _q4_k(blocks: Bytes) -> Parts:
    """Parts from eight groups of 32: scales and offsets (`_group_grid`), and 128 bytes; in each run of 32, one group in
    low nibbles, the next in high ones."""
    scales, offsets = _group_grid(blocks)
    return _runs(blocks[:, 16:]), scales, offsets


def _q5_k(blocks: Bytes) -> Parts:
    """Parts as from Q4_K, with 32 bytes between: bit g of byte i is the fifth bit of value i of group g."""
    scales, offsets = _group_grid(blocks)
    groups = np.arange(8, dtype=np.uint8)[:, None]
    fifth = blocks[:, 16:48].reshape(-1, 1, 32) >> groups & 1
    values = _runs(blocks[:, 48:]) | fifth.reshape(-1, 256) << 4
    return values.view(np.int8), scales, offsets


def _q6_k(blocks: Bytes) -> Parts:
    """Parts from 16 groups of 16: 128 bytes of lower four bits, 64 of upper two, a signed byte per group, and scale.
    Values are offset by 32."""
    count = len(blocks)
    lower = blocks[:, :128].reshape(count, 2, 1, 64)
    lower = np.concatenate((lower & 15, lower >> 4), axis=2).reshape(count, 2, 4, 32)
    upper = blocks[:, 128:192].reshape(count, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3
    values = (lower | upper << 4).reshape(count, 256).view(np.int8) - np.int8(32)
    return values, blocks[:, 192:208].view(np.int8) * halves(blocks, 208), None


def _quarters(packed: Bytes) -> Bytes:
    """[n, 64] -> [n, 256]: bit pairs of each 32 bytes, lowest first."""
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return (packed.reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)).reshape(-1, 256)


def _side_by_side(packed: Bytes) -> Bytes:
    words = packed.view("<u8")
    out = np.empty(words.shape, dtype="<u8")
    for column in range(words.shape[1]):
        out[:, column] = words[:, column]
    return out.view(np.uint8)


def _five_bits(fifth: Bytes, packed: Bytes) -> npt.NDArray[np.int8]:
    """32 values from their fifth bits ([n, 4], lowest first) and lower four bits ([n, 16]) -> [n, 32]."""
    bits = np.unpackbits(np.ascontiguousarray(fifth), axis=1, bitorder="little")
    return (split_halves(packed) | bits << 4).view(np.int8)


def _runs(packed: Bytes) -> Bytes:
    """[n, 128] -> [n, 256]: per 32 bytes, low nibbles, then high ones."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate((runs & 15, runs >> 4), axis=2).reshape(-1, 256)


def _group_grid(blocks: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scales and offsets (negative, added to the products) of eight groups, [B, 8] each, from two float16 factors and
    12 bytes: six bits of scale and six of minimum per group."""
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, (last & 15) | first >> 6 << 4), axis=1)
    subtrahends = np.concatenate((second & 63, last >> 4 | second >> 6 << 4), axis=1)
    return halves(blocks, 0) * scales, -halves(blocks, 2) * subtrahends


WHOLE_BLOCKS: tuple[BlockFormatName, ...] = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"
)  # fmt: skip
"""Block types that packed matrices keep unchanged."""
FORMATS: Mapping[str, BlockFormat] = {
    "Q4_0": BlockFormat(4, 32, _q4_0, has_offsets=True, has_half_scales=True),
    "Q4_1": BlockFormat(4, 32, _q4_1, has_offsets=True, has_half_scales=True, half_places=(0, 2)),
    "Q5_0": BlockFormat(8, 32, _q5_0, has_half_scales=True),
    "Q5_1": BlockFormat(8, 32, _q5_1, has_offsets=True, has_half_scales=True, half_places=(0, 2)),
    "Q8_0": BlockFormat(8, 32, _q8_0, has_half_scales=True),
    "Q2_K": BlockFormat(4, 16, _q2_k, has_offsets=True, half_places=(80, 82)),
    "Q3_K": BlockFormat(8, 16, _q3_k, half_places=(108,)),
    "Q4_K": BlockFormat(4, 32, _q4_k, has_offsets=True, half_places=(0, 2)),
    "Q5_K": BlockFormat(8, 32, _q5_k, has_offsets=True, half_places=(0, 2)),
    "Q6_K": BlockFormat(8, 16, _q6_k, half_places=(208,)),
    "IQ4_NL": BlockFormat(8, 32, _iq4_nl, has_half_scales=True),
    **GRID_FORMATS,
}
