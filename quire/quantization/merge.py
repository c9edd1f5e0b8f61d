"""Exact conversion of the parts of a fused matrix to one format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from quire.quantization.block_weight import BlockWeight
from quire.quantization.float_weight import Float4Weight, Float8Weight
from quire.quantization.integer_weight import IntegerWeight
from quire.quantization.quantized_weight import QuantizedWeight


def merge_rows(parts: Sequence[QuantizedWeight]) -> Sequence[QuantizedWeight] | None:
    """Parts of one fused matrix, given the same bits, group size and presence of offsets (a checkpoint may store a
    layer's projections differently), before packing. None if impossible: integers beside floats, groups that do not
    divide each other, different column orders (act-order)."""
    parts = [part.unpacked() if isinstance(part, BlockWeight) else part for part in parts]
    integers = [part for part in parts if isinstance(part, IntegerWeight)]
    if len(integers) == len(parts):
        return _merge_integers(integers)
    eights = [part for part in parts if isinstance(part, Float8Weight)]
    if len(eights) == len(parts):
        return _merge_float8(eights)
    fours = [part for part in parts if isinstance(part, Float4Weight)]
    alike = len(fours) == len(parts) and len({part.row_scales is None for part in fours}) == 1
    return fours if alike else None


def _merge_integers(parts: Sequence[IntegerWeight]) -> Sequence[IntegerWeight] | None:
    bits = max(part.bits for part in parts)
    group_size = math.gcd(*(part.group_size for part in parts))
    has_offsets = any(part.offsets is not None for part in parts)
    first = parts[0].column_order
    for part in parts:
        same = part.column_order is first or (
            part.column_order is not None and first is not None and torch.equal(part.column_order, first)
        )
        if not same:
            return None
    return [_converted(part, bits, group_size, has_offsets) for part in parts]


def _converted(part: IntegerWeight, bits: int, group_size: int, has_offsets: bool) -> IntegerWeight:
    if (part.bits, part.group_size, part.offsets is not None) == (bits, group_size, has_offsets):
        return part
    repeats = part.group_size // group_size
    scales, offsets = part.scales, part.offsets
    if has_offsets and offsets is None:
        offsets = torch.zeros_like(scales)
    if repeats > 1:
        scales = scales.repeat_interleave(repeats, dim=1)
        offsets = None if offsets is None else offsets.repeat_interleave(repeats, dim=1)
    values = part.values if part.bits == bits else part.values.to(torch.int8)
    return replace(part, values=values, bits=bits, group_size=group_size, scales=scales, offsets=offsets)


def _merge_float8(parts: Sequence[Float8Weight]) -> Sequence[Float8Weight] | None:
    smallest = min(part.group_size for part in parts)
    columns = parts[0].shape[1]
    groups = torch.arange(-(-columns // smallest))
    merged = []
    for part in parts:
        if part.group_size % smallest and part.scales.shape[1] > 1:
            return None
        scales = part.scales[:, groups * smallest // part.group_size]
        merged.append(replace(part, scales=scales, group_size=smallest))
    return merged
