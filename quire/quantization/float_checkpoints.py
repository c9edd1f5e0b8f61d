"""Matrices of checkpoints with 8-bit and 4-bit floats.

Layout of a matrix with K input features and N output rows in 8-bit floats (e4m3), in every kind of checkpoint:

    weight              [N, K] float8_e4m3fn
    weight_scale        one number, [N] or [N, 1], or [N / B, K / C] for blocks of B rows and C features, the last ones
                        maybe cut off (DeepSeek and others call it weight_scale_inv)

Layouts in 4-bit floats (e2m1), two to a byte, the first in the lower half, with G = K / group:

    weight_packed       [N, K / 2] uint8                   compressed-tensors
    weight_scale        [N, G] uint8 (mxfp4: groups of 32) or float8_e4m3fn (nvfp4: groups of 16)
    weight_global_scale [1]                                nvfp4 only: divisor of the scales

    weight              [N, K / 2] uint8                   ModelOpt, nvfp4
    weight_scale        [N, G] float8_e4m3fn
    weight_scale_2      []                                 factor of the scales

    <name>_blocks       [E, N, G, 16] uint8                GPT-OSS, mxfp4: a matrix for each of E experts
    <name>_scales       [E, N, G] uint8

Scales of activations (input_scale, input_global_scale, activation_scale) are ignored: activations are not rounded.
"""

from __future__ import annotations

import torch

from quire.config.quantization import QuantizationConfig
from quire.quantization.float_weight import MX_GROUP, NV_GROUP, Float4Weight, Float8Weight
from quire.quantization.parts import FLOATING, MatrixFormat, Parts

OF_ACTIVATIONS = {
    name: lambda _: True for name in ("input_scale", "input_global_scale", "activation_scale", "input_scale_ub")
}
EXPONENTS = torch.float8_e8m0fnu
SCALE_DTYPES = (*FLOATING, EXPONENTS)
MX_BYTES = MX_GROUP // 2


def float8_format(config: QuantizationConfig) -> MatrixFormat:
    return MatrixFormat(
        frozenset(("weight", "weight_scale")),
        lambda parts: _float8(parts, config.block_size),
        OF_ACTIVATIONS,
        torch.float8_e4m3fn,
        {"weight_scale_inv": "weight_scale"},
    )


def _float8(parts: Parts, block_size: tuple[int, int] | None) -> Float8Weight:
    values = parts.take("weight", (torch.float8_e4m3fn,), (None, None))
    rows, columns = values.shape
    if block_size is not None:
        down, across = block_size
        stored = parts.take("weight_scale", SCALE_DTYPES, (-(-rows // down), -(-columns // across))).float()
        return Float8Weight(values, stored.repeat_interleave(down, 0)[:rows], across)
    stored = parts.tensors["weight_scale"]
    shape: tuple[int, ...] = ()
    if stored.dim() > 0:
        shape = (rows if stored.numel() > 1 else 1,) + (1,) * (stored.dim() - 1)
    scales = parts.take("weight_scale", SCALE_DTYPES, shape).float()
    return Float8Weight(values, scales.reshape(-1, 1).expand(rows, 1).contiguous(), columns)


def nvfp4_format(config: QuantizationConfig) -> MatrixFormat:
    if config.checkpoint_format == "nvfp4-pack-quantized":
        required = frozenset(("weight_packed", "weight_scale", "weight_global_scale"))
        return MatrixFormat(required, _nvfp4_divided, OF_ACTIVATIONS)
    required = frozenset(("weight", "weight_scale", "weight_scale_2"))
    return MatrixFormat(required, _nvfp4_multiplied, OF_ACTIVATIONS, torch.uint8)


def _nvfp4_divided(parts: Parts) -> Float4Weight:
    divisor = parts.scalar("weight_global_scale")
    if divisor == 0:
        raise parts.error("weight_global_scale", "is 0, and scales are divided by it")
    return _nvfp4(parts, "weight_packed", 1 / divisor)


def _nvfp4_multiplied(parts: Parts) -> Float4Weight:
    return _nvfp4(parts, "weight", parts.scalar("weight_scale_2"))


def _nvfp4(parts: Parts, name: str, factor: float) -> Float4Weight:
    pairs = parts.take(name, (torch.uint8,), (None, None))
    rows, columns = pairs.shape[0], 2 * pairs.shape[1]
    codes = parts.take("weight_scale", (torch.float8_e4m3fn,), (rows, -(-columns // NV_GROUP))).view(torch.uint8)
    return Float4Weight(pairs, codes, columns, torch.full((rows,), factor))


def mxfp4_format(config: QuantizationConfig) -> MatrixFormat:
    if config.checkpoint_format == "mxfp4-pack-quantized":
        return MatrixFormat(frozenset(("weight_packed", "weight_scale")), _mxfp4)
    return MatrixFormat(frozenset(("blocks", "scales")), _mxfp4_of_experts, separator="_")


def _mxfp4(parts: Parts) -> Float4Weight:
    pairs = parts.take("weight_packed", (torch.uint8,), (None, None))
    rows, columns = pairs.shape[0], 2 * pairs.shape[1]
    codes = parts.take("weight_scale", (torch.uint8, EXPONENTS), (rows, -(-columns // MX_GROUP)))
    return Float4Weight(pairs, codes.view(torch.uint8), columns)


def _mxfp4_of_experts(parts: Parts) -> Float4Weight:
    blocks = parts.take("blocks", (torch.uint8,), (None, None, None, MX_BYTES))
    experts, rows, groups, _ = blocks.shape
    codes = parts.take("scales", (torch.uint8,), (experts, rows, groups))
    return Float4Weight(blocks.flatten(2), codes, groups * MX_GROUP)
