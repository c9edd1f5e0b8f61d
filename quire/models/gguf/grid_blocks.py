"""Exact unpacking of GGUF's IQ and TQ blocks, like blocks.py. Most hold codebook indices (codebooks.py) and signs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import numpy.typing as npt

from quire.models.gguf.block_format import BlockFormat, Bytes, Floats, Parts, halves, split_halves
from quire.models.gguf.codebooks import words

Words = npt.NDArray[np.uint64]
NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)
"""Values of the four-bit codes of IQ4 types."""
_TWO_BITS = (8, 25, 43)
_THREE_BITS = (4, 12, 20, 28, 36, 44, 52, 62)
_UPPER_HALVES = tuple(range(8, 16))
"""Four-bit codes of IQ3_S's magnitudes, the odd numbers up to 15; codes 0 to 7 are the negative ones."""
_TERNARY = (0, 1, 2)
_DELTA = np.float32(0.125)
"""Shift that IQ1 adds to all weights of a run, or subtracts."""
_HALF = np.float32(0.5)
_TWO_BIT_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)
_SEVEN_BIT_SHIFTS = np.array([0, 7, 14, 21], dtype="<u4")
_THREE_BIT_SHIFTS = np.array([0, 3, 6, 9], dtype="<u2")
_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], dtype=np.uint8)


def _iq4_xs(blocks: Bytes) -> Parts:
    """Parts from scale, 16 bits (eight group scales' upper two), four bytes (their lower four bits), and 16 bytes per
    group as in IQ4_NL."""
    upper = blocks[:, 2:4].view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (_nibbles(blocks[:, 4:8]) | upper.astype(np.uint8) << 4).view(np.int8) - np.int8(32)
    codes = split_halves(np.ascontiguousarray(blocks[:, 8:]).reshape(-1, 16))
    return NONLINEAR[codes].reshape(-1, 256), halves(blocks, 0) * scales, None


def _iq2_xxs(blocks: Bytes) -> Parts:
    """Parts from float16 scale and eight bytes per group of 32 weights: four grid indices, a byte each, and 32 bits:
    four times seven of signs below four of scale."""
    pairs = blocks[:, 2:].view("<u4").reshape(-1, 8, 2)
    entries = np.ascontiguousarray(pairs[:, :, 0]).view(np.uint8)
    values, steps = _with_even_signs(words("IQ2_XXS", _TWO_BITS)[entries], pairs[:, :, 1])
    return values, halves(blocks, 0) * steps * np.float32(0.25), None


def _iq2_xs(blocks: Bytes) -> Parts:
    """Parts from scale, 32 x 16 bits (nine of entry, seven of signs), and 16 groups' four-bit scales."""
    codes = blocks[:, 2:66].view("<u2")
    signs = _sign_masks()[_even_signs()[codes >> 9]]
    values = _signed(words("IQ2_XS", _TWO_BITS)[codes & 511], signs)
    return values, halves(blocks, 0) * (_HALF + _nibbles(blocks[:, 66:])) * np.float32(0.25), None


def _iq2_s(blocks: Bytes) -> Parts:
    """Parts from scale, 32 entries, a byte of signs each, the entries' upper bit pairs, and scales as in IQ2_XS."""
    upper = (blocks[:, 66:74, None] >> _TWO_BIT_SHIFTS & 3).reshape(-1, 32)
    entries = words("IQ2_S", _TWO_BITS)[blocks[:, 2:34] | upper.astype(np.uint16) << 8]
    values = _signed(entries, _sign_masks()[blocks[:, 34:66]])
    return values, halves(blocks, 0) * (_HALF + _nibbles(blocks[:, 74:])) * np.float32(0.25), None


def _iq3_xxs(blocks: Bytes) -> Parts:
    """Parts from scale, 64 entries of four weights, and 32 bits per group as in IQ2_XXS."""
    entries = words("IQ3_XXS", _THREE_BITS)[blocks[:, 2:66]].view("<u8")
    values, steps = _with_even_signs(entries, blocks[:, 66:].view("<u4"))
    return values, halves(blocks, 0) * steps * _HALF, None


def _iq3_s(blocks: Bytes) -> Parts:
    """Parts from scale, 64 entries of four weights, their ninth bits, a byte of signs per eight weights, and eight
    groups' four-bit scales."""
    ninth = np.unpackbits(np.ascontiguousarray(blocks[:, 66:74]), axis=1, bitorder="little")
    entries = words("IQ3_S", _UPPER_HALVES)[blocks[:, 2:66] | ninth.astype(np.uint16) << 8].view("<u8")
    codes = entries ^ (_sign_masks()[blocks[:, 74:106]] & np.uint64(0x0F0F0F0F0F0F0F0F))
    scales = halves(blocks, 0) * (1 + 2 * _nibbles(blocks[:, 106:])).astype(np.float32)
    return codes.view(np.uint8), np.float32(2) * scales, np.float32(-15) * scales


def _iq1_s(blocks: Bytes) -> Parts:
    """Parts from scale, 32 entries, and 16 bits per group: three more per entry, three of scale, and the delta's
    sign."""
    grid = blocks[:, 34:].view("<u2")
    upper = (grid[:, :, None] >> _THREE_BIT_SHIFTS & 7).reshape(-1, 32)
    codes = words("IQ1_S", _TERNARY)[blocks[:, 2:34] | upper << 8]
    scales = halves(blocks, 0) * (2 * (grid >> 12 & 7) + 1).astype(np.float32)
    deltas = np.where(grid >> 15, -_DELTA, _DELTA).astype(np.float32)
    return codes.view(np.uint8), scales, scales * (deltas - np.float32(1))


def _iq1_m(blocks: Bytes) -> Parts:
    """Parts from 32 entries, four bits each (three more, and the delta's sign), and four times 16 bits: three per group
    scale, and four of overall scale."""
    grid = blocks[:, 48:].view("<u2")
    half = np.bitwise_or.reduce(grid >> 12 << np.array([0, 4, 8, 12], dtype=np.uint16), axis=1, keepdims=True)
    scale = half.astype("<u2").view("<f2").astype(np.float32)
    nibbles = _nibbles(blocks[:, 32:48])
    entries = words("IQ1_S", tuple(4 * size for size in _TERNARY))[
        blocks[:, :32] | (nibbles & 7).astype(np.uint16) << 8
    ]
    is_added = np.where(nibbles & 8, np.uint64(0), np.uint64(0x0101010101010101))
    steps = (grid[:, :, None] >> _THREE_BIT_SHIFTS & 7).reshape(-1, 16)
    scales = scale * (2 * steps + 1).astype(np.float32)
    return (entries | is_added).view(np.uint8), 2 * _DELTA * scales, -9 * _DELTA * scales


def _tq1_0(blocks: Bytes) -> Parts:
    """Parts from 48 bytes of five base-3 weights, four bytes of four, and scale."""
    runs = [(blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)]
    shifted = [(part[:, None] * _POWERS_OF_3[:count, None]).reshape(len(blocks), -1) for part, count in runs]
    digits = np.concatenate(shifted, axis=1).astype(np.uint16) * np.uint16(3) >> 8
    scales = halves(blocks, 52)
    return digits.astype(np.uint8), scales, -scales


def _tq2_0(blocks: Bytes) -> Parts:
    """Parts from 64 bytes of bit pairs, per 32 bytes lowest first, and scale. Weights are offset by 1."""
    values = (blocks[:, :64].reshape(-1, 2, 1, 32) >> _TWO_BIT_SHIFTS[:, None] & np.uint8(3)).reshape(-1, 256)
    scales = halves(blocks, 64)
    return values, scales, -scales


def _nibbles(packed: Bytes) -> Bytes:
    return np.stack((packed & 15, packed >> 4), axis=2).reshape(len(packed), -1)


def _with_even_signs(entries: Words, grid: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.int8], Floats]:
    """Signed weights [n, 256] and scales [n, 8]. entries: [n, 32], eight weights each. grid: [n, 8], seven bits of
    signs four times, below the scale."""
    codes = (grid[:, :, None] >> _SEVEN_BIT_SHIFTS & 127).reshape(-1, 32)
    return _signed(entries, _sign_masks()[_even_signs()[codes]]), _HALF + (grid >> 28).astype(np.float32)


def _signed(sizes: Words, masks: Words) -> npt.NDArray[np.int8]:
    return (sizes ^ masks).view(np.int8) - masks.view(np.int8)


@cache
def _sign_masks() -> Words:
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (bits * np.uint8(255)).view("<u8")[:, 0]


@cache
def _even_signs() -> Bytes:
    """Eight signs by the first seven, [128]: the number of minus signs is even."""
    seven = np.arange(128, dtype=np.uint8)
    return seven | np.bitwise_xor.reduce(np.unpackbits(seven[:, None], axis=1), axis=1) << np.uint8(7)


GRID_FORMATS: Mapping[str, BlockFormat] = {
    "IQ4_XS": BlockFormat(8, 32, _iq4_xs),
    "IQ3_S": BlockFormat(4, 32, _iq3_s, has_offsets=True),
    "IQ3_XXS": BlockFormat(8, 32, _iq3_xxs),
    "IQ2_S": BlockFormat(8, 16, _iq2_s),
    "IQ2_XS": BlockFormat(8, 16, _iq2_xs),
    "IQ2_XXS": BlockFormat(8, 32, _iq2_xxs),
    "IQ1_S": BlockFormat(4, 32, _iq1_s, has_offsets=True),
    "IQ1_M": BlockFormat(4, 16, _iq1_m, has_offsets=True),
    "TQ1_0": BlockFormat(4, 256, _tq1_0, has_offsets=True, has_half_scales=True),
    "TQ2_0": BlockFormat(4, 256, _tq2_0, has_offsets=True, has_half_scales=True),
}
