"""Matrices of compressed-tensors checkpoints.

Layout of a matrix with K input features, N output rows and G groups (G = 1: one scale per row) in the format
pack-quantized. A 32-bit word holds 32 / bits numbers, the first in the lowest bits, each plus 2 ** (bits - 1):

    weight_packed      [N, ceil(K * bits / 32)] int32    word c of row n holds the features from c * 32 / bits on
    weight_scale       [N, G]
    weight_zero_point  [ceil(N * bits / 32), G] int32    asymmetric only: word r holds the rows from r * 32 / bits on
    weight_shape       [2]                               N, K
    weight_g_idx       [K] int32                         act-order only: the group of each feature

Layout in the format int-quantized:

    weight             [N, K] int8
    weight_scale       [N, 1] (or [N])
    weight_zero_point  [N, 1] int8    asymmetric only

    w[n, k] = weight_scale[n, g] * (q[n, k] - weight_zero_point[n, g])
"""

from __future__ import annotations

import torch

from quire.config.quantization import QuantizationConfig
from quire.quantization.gptq import with_zero_points
from quire.quantization.integer_weight import IntegerWeight
from quire.quantization.packing import per_word, unpack_rows
from quire.quantization.parts import FLOATING, INTEGRAL, MatrixFormat, Parts, by_group


def compressed_tensors_format(config: QuantizationConfig) -> MatrixFormat:
    """Format of the matrices, for `quantized_weights`. Symmetric matrices may have zero points, all 0."""
    packed = config.checkpoint_format == "pack-quantized"
    required = {"weight_packed", "weight_scale", "weight_shape"} if packed else {"weight", "weight_scale"}
    harmless = {}
    if config.symmetric:
        harmless["weight_zero_point"] = _all_zero
    else:
        required.add("weight_zero_point")
    if config.reordered:
        required.add("weight_g_idx")

    def build(parts: Parts) -> IntegerWeight:
        return _build_packed(parts, config) if packed else _build_int8(parts, config)

    return MatrixFormat(frozenset(required), build, harmless)


def _all_zero(tensor: torch.Tensor) -> bool:
    return not bool(tensor.any())


def _build_packed(parts: Parts, config: QuantizationConfig) -> IntegerWeight:
    bits, fields = config.bits, per_word(config.bits)
    rows, columns = (int(size) for size in parts.take("weight_shape", INTEGRAL, (2,)))
    if rows < 1 or columns < 1:
        raise parts.error("weight_shape", f"says {rows} by {columns}")
    group_size = parts.group_size("weight_packed", columns, config.group_size)
    groups = columns // group_size
    words = parts.take("weight_packed", (torch.int32,), (rows, -(-columns // fields)))
    values = unpack_rows(words, bits)[:, :columns].contiguous()
    scales = parts.scales("weight_scale", (rows, groups))
    if config.symmetric:
        zeros = torch.full((rows, groups), 2 ** (bits - 1), dtype=torch.uint8)
    else:
        packed = parts.take("weight_zero_point", (torch.int32,), (-(-rows // fields), groups))
        zeros = unpack_rows(packed.t(), bits)[:, :rows].t()
    order = None
    if config.reordered:
        values, order = by_group(values, parts.take("weight_g_idx", INTEGRAL, (columns,)).long(), group_size)
    return with_zero_points(values, bits, group_size, scales, zeros, order)


def _build_int8(parts: Parts, config: QuantizationConfig) -> IntegerWeight:
    values = parts.take("weight", (torch.int8,), (None, None))
    rows, columns = values.shape
    if parts.tensors["weight_scale"].dim() == 1:
        scales = parts.take("weight_scale", FLOATING, (rows,)).float().unsqueeze(1)
    else:
        scales = parts.scales("weight_scale", (rows, 1))
    offsets = None
    if not config.symmetric:
        offsets = -scales * parts.take("weight_zero_point", (torch.int8,), (rows, 1)).float()
    return IntegerWeight(values, 8, columns, scales, offsets)
