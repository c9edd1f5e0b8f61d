"""Quantised parts of a matrix, packed into panels for the native kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quire.kernels.cpu._native import WeightType
from quire.kernels.cpu.packing import BlockMatrix, HalfScaleMatrix, PackedMatrix
from quire.quantization.block_weight import BlockWeight
from quire.quantization.float_weight import Float4Weight, Float8Weight
from quire.quantization.integer_weight import IntegerWeight
from quire.quantization.interface import LinearShape
from quire.quantization.merge import merge_rows
from quire.quantization.quantized_weight import QuantizedWeight

INTEGER_TYPES = {8: WeightType.I8, 4: WeightType.I4}
MOST_RUNS = 3
"""Maximum parts of a fused matrix: queries, keys and values, or gate and up."""
ROUNDED_BITS = 8


def runs_of_blocks(parts: Sequence[QuantizedWeight]) -> list[list[QuantizedWeight]]:
    """Stacked parts of a matrix in runs, each packed as a matrix: blocks by format; one run if some parts are no
    blocks."""
    runs: list[list[QuantizedWeight]] = []
    last = None
    for part in parts:
        if not isinstance(part, BlockWeight):
            return [list(parts)]
        if part.format != last:
            runs.append([])
        runs[-1].append(part)
        last = part.format
    return runs if len(runs) <= MOST_RUNS else [list(parts)]


def pack_parts(
    parts: Sequence[QuantizedWeight],
    shape: LinearShape,
    *,
    rounded_activations: bool,
    memory: Callable[[int], torch.Tensor],
) -> PackedMatrix | None:
    """Packed matrix of the stacked parts. None if no format holds them all. rounded_activations: round activations to 8
    bits, with a scale per row (integers) or group (blocks); never for floats. memory: allocates zeroed memory."""
    blocks = [part for part in parts if isinstance(part, BlockWeight)]
    if len(blocks) == len(parts) and len({part.format for part in blocks}) == 1:
        return _pack_blocks(blocks, shape, rounded_activations, memory)
    merged = merge_rows(parts)
    if merged is None:
        return None
    matrix = _empty(merged, shape, rounded_activations, memory)
    row = 0
    for part in merged:
        _load(matrix, part, row)
        row += part.shape[0]
    if isinstance(merged[0], IntegerWeight) and merged[0].column_order is not None:
        matrix.set_column_order(merged[0].column_order)
    return matrix


def _pack_blocks(
    parts: Sequence[BlockWeight], shape: LinearShape, rounded_activations: bool, memory: Callable[[int], torch.Tensor]
) -> PackedMatrix:
    rows = sum(part.shape[0] for part in parts)
    matrix = BlockMatrix(parts[0].format, shape.in_features, rows, gated=shape.gated, memory=memory)
    matrix.activation_bits = ROUNDED_BITS if rounded_activations else 0
    row = 0
    for part in parts:
        matrix.load_blocks(part.rows, row)
        part.release()
        row += part.shape[0]
    return matrix


def _empty(
    parts: Sequence[QuantizedWeight],
    shape: LinearShape,
    rounded_activations: bool,
    memory: Callable[[int], torch.Tensor],
) -> PackedMatrix:
    first = parts[0]
    sizes = (shape.in_features, shape.out_features)
    if isinstance(first, IntegerWeight):
        halves = all(part.has_half_scales for part in parts if isinstance(part, IntegerWeight))
        return (HalfScaleMatrix if halves else PackedMatrix)(
            INTEGER_TYPES[first.bits],
            *sizes,
            group_size=first.group_size,
            gated=shape.gated,
            integer_activations=rounded_activations,
            with_offsets=first.offsets is not None,
            memory=memory,
        )
    if isinstance(first, Float8Weight):
        return PackedMatrix(WeightType.E4M3, *sizes, group_size=first.group_size, gated=shape.gated, memory=memory)
    assert isinstance(first, Float4Weight), "every quantised matrix has a type of panels"
    kind = WeightType.MXFP4 if first.row_scales is None else WeightType.NVFP4
    return PackedMatrix(kind, *sizes, gated=shape.gated, memory=memory)


def _load(matrix: PackedMatrix, part: QuantizedWeight, first_row: int) -> None:
    if isinstance(part, IntegerWeight):
        matrix.load_integer(part.values, part.scales, part.offsets, first_row)
    elif isinstance(part, Float8Weight):
        matrix.load_float8(part.values, part.scales, first_row)
    elif isinstance(part, Float4Weight):
        matrix.load_float4(part.pairs, part.scale_codes, part.row_scales, first_row)
