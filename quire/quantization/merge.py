"""Bringing the parts of one fused matrix to one integer format, exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from quire.quantization.integer_weight import IntegerWeight


def merge_rows(parts: Sequence[IntegerWeight]) -> list[IntegerWeight] | None:
    """The same weights with the same number of bits, group size and presence of offsets (a checkpoint may keep the
    projections of one layer in different formats). None when they order their columns differently (act-order)."""
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
    repeats = part.group_size // group_size
    scales, offsets = part.scales, part.offsets
    if has_offsets and offsets is None:
        offsets = torch.zeros_like(scales)
    if repeats > 1:
        scales = scales.repeat_interleave(repeats, dim=1)
        offsets = None if offsets is None else offsets.repeat_interleave(repeats, dim=1)
    values = part.values if part.bits == bits else part.values.to(torch.int8)
    return replace(part, values=values, bits=bits, group_size=group_size, scales=scales, offsets=offsets)
