"""Common parts of the gated delta rule's kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.config.model_shape import STATE_BORDER
from quire.kernels.triton.runtime import INTERPRETED, interpreted_dot

BORDER = tl.constexpr(STATE_BORDER)
SMALLEST_TILE = 16
"""Rows of the smallest product tile."""


@triton.jit
def step_of(query_start, seq_lens, sequence):
    """Sequence's first token in the step, and its token counts before and after."""
    first = tl.load(query_start + sequence)
    length = tl.load(seq_lens + sequence)
    return first, length - (tl.load(query_start + sequence + 1) - first), length


@triton.jit
def compiled_product(a, b, accumulator):
    """`product` on a GPU, to 22 bits."""
    return tl.dot(a, b, accumulator, input_precision="tf32x3")


product = interpreted_dot if INTERPRETED else compiled_product
"""accumulator + a @ b, all float32."""
