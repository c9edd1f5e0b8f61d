"""Matrices of GPTQ and AWQ checkpoints.

Layout of a GPTQ matrix with K input features, N output rows and G groups. A 32-bit word holds 32 / bits numbers, the
first in the lowest bits:

    qweight  [K * bits / 32, N] int32    word r of row n holds the features from r * 32 / bits on, in their own order
    qzeros   [G, N * bits / 32] int32    zero points; format gptq stores each less one, modulo 2 ** bits
    scales   [G, N]
    g_idx    [K] int32                   the group of each feature

    w[n, k] = scales[g_idx[k], n] * (q[n, k] - zero[g_idx[k], n])

AWQ's layout called gemm, of 4 bits:

    qweight  [K, N / 8] int32    word c of feature k holds the rows from 8 c on, in the order of AWQ_ROWS_OF_WORD
    qzeros   [G, N / 8] int32    zero points, in the same order
    scales   [G, N]
"""

from __future__ import annotations

import torch

from quire.config.quantization import QuantizationConfig
from quire.quantization.integer_weight import IntegerWeight
from quire.quantization.packing import per_word, recentre, unpack_rows
from quire.quantization.parts import INTEGRAL, MatrixFormat, Parts, by_group

PARTS = frozenset(("qweight", "qzeros", "scales"))
AWQ_ROWS_OF_WORD = (0, 2, 4, 6, 1, 3, 5, 7)
"""Row within a word's 8 for each 4 bits, lowest bits first."""
AWQ_BITS = 4


def gptq_format(config: QuantizationConfig) -> MatrixFormat:
    """Format of GPTQ's matrices. Without act-order a g_idx is allowed that has the groups in their natural order."""

    def build(parts: Parts) -> IntegerWeight:
        return _build(parts, config)

    def is_plain(group_of: torch.Tensor) -> bool:
        features = torch.arange(group_of.numel())
        return torch.equal(group_of.long(), features // (config.group_size or max(1, group_of.numel())))

    if config.reordered:
        return MatrixFormat(PARTS | {"g_idx"}, build)
    return MatrixFormat(PARTS, build, {"g_idx": is_plain})


def _build(parts: Parts, config: QuantizationConfig) -> IntegerWeight:
    bits, fields = config.bits, per_word(config.bits)
    words = parts.take("qweight", (torch.int32,), (None, None))
    columns, rows = words.shape[0] * fields, words.shape[1]
    group_size = parts.group_size("qweight", columns, config.group_size)
    groups = columns // group_size
    if rows % fields:
        raise parts.error("qweight", f"has {rows} output rows, which are no multiple of {fields}")
    zeros = unpack_rows(parts.take("qzeros", (torch.int32,), (groups, rows // fields)), bits)
    if config.checkpoint_format == "gptq":
        zeros = (zeros + 1) & (2**bits - 1)
    scales = parts.scales("scales", (groups, rows)).t().contiguous()
    values, order = unpack_rows(words.t(), bits), None
    if config.reordered:
        values, order = by_group(values, parts.take("g_idx", INTEGRAL, (columns,)).long(), group_size)
    return with_zero_points(values, bits, group_size, scales, zeros.t(), order)


def with_zero_points(
    values: torch.Tensor,
    bits: int,
    group_size: int,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    order: torch.Tensor | None = None,
) -> IntegerWeight:
    """Matrix of w = scale * (value - zero). values: [N, K] uint8; scales: [N, G] float32; zeros: [N, G] uint8."""
    if bits == 4:
        return IntegerWeight(values, 4, group_size, scales, -scales * zeros, order)
    centre = 128
    offsets = None if bool((zeros == centre).all()) else scales * (centre - zeros.float())
    return IntegerWeight(recentre(values), 8, group_size, scales, offsets, order)


def awq_format(config: QuantizationConfig) -> MatrixFormat:
    return MatrixFormat(PARTS, lambda parts: _build_awq(parts, config.group_size))


def _build_awq(parts: Parts, wanted_group_size: int | None) -> IntegerWeight:
    words = parts.take("qweight", (torch.int32,), (None, None))
    columns, rows = words.shape[0], words.shape[1] * len(AWQ_ROWS_OF_WORD)
    group_size = parts.group_size("qweight", columns, wanted_group_size)
    groups = columns // group_size
    zeros = _unpack_awq(parts.take("qzeros", (torch.int32,), (groups, words.shape[1])))
    scales = parts.scales("scales", (groups, rows)).t().contiguous()
    return with_zero_points(_unpack_awq(words).t().contiguous(), AWQ_BITS, group_size, scales, zeros.t())


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """[R, W] int32 -> [R, 8 W] uint8, the rows of each word in order."""
    fields = unpack_rows(words, AWQ_BITS).view(*words.shape, len(AWQ_ROWS_OF_WORD))
    place_of_row = [AWQ_ROWS_OF_WORD.index(row) for row in range(len(AWQ_ROWS_OF_WORD))]
    return fields[..., place_of_row].flatten(1)
