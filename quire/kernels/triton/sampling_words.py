"""Loads of a row's sampling parameters: 32-bit words (layout: `quire.sampling.parameters`)."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.sampling.parameters import WORD_OF

FEATURES = tl.constexpr(WORD_OF["features"])
SEED = tl.constexpr(WORD_OF["seed"])
TOP_P = tl.constexpr(WORD_OF["top_p"])
TOP_K = tl.constexpr(WORD_OF["top_k"])
TEMPERATURE = tl.constexpr(WORD_OF["temperature"])
MIN_P = tl.constexpr(WORD_OF["min_p"])
PRESENCE_PENALTY = tl.constexpr(WORD_OF["presence_penalty"])
FREQUENCY_PENALTY = tl.constexpr(WORD_OF["frequency_penalty"])
REPETITION_PENALTY = tl.constexpr(WORD_OF["repetition_penalty"])
MIN_TOKENS = tl.constexpr(WORD_OF["min_tokens"])


@triton.jit
def load_integer(words, COLUMN: tl.constexpr):
    """Integer parameter of a row. words: pointer to the row's first word."""
    return tl.load(words + COLUMN)


@triton.jit
def load_float(words, COLUMN: tl.constexpr):
    return tl.load(words + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def load_bits(words, COLUMN: tl.constexpr):
    low = tl.load(words + COLUMN).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(words + COLUMN + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32) | low


@triton.jit
def load_double(words, COLUMN: tl.constexpr):
    return load_bits(words, COLUMN).to(tl.float64, bitcast=True)
