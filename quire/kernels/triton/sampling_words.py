"""A row's sampling parameters as the kernels read them: 32-bit words, one column each.

A number of 64 bits takes two words, the lower half first; floats are written bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

FEATURES = tl.constexpr(0)
SEED = tl.constexpr(1)
"""uint64."""
TOP_P = tl.constexpr(3)
"""float64, 1 is off."""
TOP_K = tl.constexpr(5)
"""0 or less is off; at most 2**31 - 1, more than any vocabulary has."""
TEMPERATURE = tl.constexpr(6)
"""float32; 0 takes the best token, others are at least 1e-30."""
MIN_P = tl.constexpr(7)
PRESENCE_PENALTY = tl.constexpr(8)
FREQUENCY_PENALTY = tl.constexpr(9)
REPETITION_PENALTY = tl.constexpr(10)
MIN_TOKENS = tl.constexpr(11)
NUM_WORDS = 12


@triton.jit
def load_integer(words, COLUMN: tl.constexpr):
    """words: where the row begins."""
    return tl.load(words + COLUMN)


@triton.jit
def load_float(words, COLUMN: tl.constexpr):
    """A float32."""
    return tl.load(words + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def load_bits(words, COLUMN: tl.constexpr):
    """Two words as one uint64."""
    low = tl.load(words + COLUMN).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(words + COLUMN + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32) | low


@triton.jit
def load_double(words, COLUMN: tl.constexpr):
    """Two words as one float64."""
    return load_bits(words, COLUMN).to(tl.float64, bitcast=True)
