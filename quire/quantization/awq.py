"""Matrices of AWQ checkpoints in the layout called gemm: 4 bits, with zero points.

Layout of a matrix with K input features, N output rows and G groups:

    qweight  [K, N / 8] int32    word c of feature k holds the rows from 8 c on, in the order of ROWS_OF_WORD
    qzeros   [G, N / 8] int32    zero points, in the same order
    scales   [G, N]

    w[n, k] = scales[g, n] * (q[n, k] - zero[g, n])
"""

from __future__ import annotations

import torch

from quire.config.quantization import QuantizationConfig
from quire.quantization.gptq import with_zero_points
from quire.quantization.integer_weight import IntegerWeight
from quire.quantization.packing import unpack_rows
from quire.quantization.parts import MatrixFormat, Parts

ROWS_OF_WORD = (0, 2, 4, 6, 1, 3, 5, 7)
"""Row within a word's 8 for each 4 bits, lowest bits first."""
BITS = 4


def awq_format(config: QuantizationConfig) -> MatrixFormat:
    return MatrixFormat(frozenset(("qweight", "qzeros", "scales")), lambda parts: _build(parts, config.group_size))


def _build(parts: Parts, wanted_group_size: int | None) -> IntegerWeight:
    words = parts.take("qweight", (torch.int32,), (None, None))
    columns, rows = words.shape[0], words.shape[1] * len(ROWS_OF_WORD)
    group_size = parts.group_size("qweight", columns, wanted_group_size)
    groups = columns // group_size
    zeros = _unpack(parts.take("qzeros", (torch.int32,), (groups, words.shape[1])))
    scales = parts.scales("scales", (groups, rows)).t().contiguous()
    return with_zero_points(_unpack(words).t().contiguous(), BITS, group_size, scales, zeros.t())


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """[R, W] int32 -> [R, 8 W] uint8, in the order of the output rows."""
    fields = unpack_rows(words, BITS).view(*words.shape, len(ROWS_OF_WORD))
    place_of_row = [ROWS_OF_WORD.index(row) for row in range(len(ROWS_OF_WORD))]
    return fields[..., place_of_row].flatten(1)
