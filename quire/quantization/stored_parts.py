"""Quantised parts of a matrix, stored for a device's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from quire.errors import ModelLoadError
from quire.kernels.triton.weight_formats import E4M3, I4, I8, LEAST_K, MXFP4, NVFP4, PAIRED, StoredMatrix
from quire.quantization.float_weight import Float4Weight, Float8Weight
from quire.quantization.integer_weight import IntegerWeight
from quire.quantization.merge import merge_rows
from quire.quantization.quantized_weight import QuantizedWeight

HALF = PAIRED // 2


@dataclass(frozen=True, slots=True)
class StoredParts:
    """Parts of a matrix in a device's format. matrix: stacked parts, as a stack of one. column_order: column k of it
    belongs to input feature column_order[k]; None: to k."""

    matrix: StoredMatrix
    column_order: torch.Tensor | None


def store_parts(parts: Sequence[QuantizedWeight], *, converts_e4m3: bool) -> StoredParts | None:
    """Stored matrix of the stacked parts. None if no format holds them all. converts_e4m3: the device has e4m3
    conversions."""
    merged = merge_rows(parts)
    if merged is None:
        return None
    stored = [_stored(part, converts_e4m3) for part in merged]
    kind, group_size = stored[0].kind, stored[0].group_size
    if kind != NVFP4.value and group_size % (2 * LEAST_K if kind >= I4.value else LEAST_K):
        return None
    first = merged[0]
    order = first.column_order if isinstance(first, IntegerWeight) else None
    return StoredParts(
        stored[0].with_tensors([_joined(each) for each in zip(*(one.tensors for one in stored), strict=True)]), order
    )


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    if tensors[0].dtype != torch.float8_e4m3fn:
        return torch.cat(tensors, dim=1)
    # Not every device can concatenate float8.
    return torch.cat([each.view(torch.uint8) for each in tensors], dim=1).view(torch.float8_e4m3fn)


def _stored(part: QuantizedWeight, converts_e4m3: bool) -> StoredMatrix:
    columns = part.shape[1]
    if isinstance(part, Float4Weight):
        codes = _paired(torch.stack((part.pairs & 0xF, part.pairs >> 4), dim=-1).flatten(1)[:, :columns])
        kind = MXFP4 if part.row_scales is None else NVFP4
        row_scales = None if part.row_scales is None else part.row_scales[None]
        return StoredMatrix(kind.value, columns, codes, part.scale_codes[None], part.group_size, row_scales=row_scales)
    assert isinstance(part, Float8Weight | IntegerWeight), "every quantised matrix has a format"
    group_size = 0 if part.scales.shape[1] == 1 else part.group_size
    if isinstance(part, Float8Weight):
        values = part.values if converts_e4m3 else part.values.view(torch.uint8)
        return StoredMatrix(E4M3.value, columns, values[None], part.scales[None], group_size)
    codes = _paired(part.values) if part.bits == 4 else part.values[None]
    kind = I4 if part.bits == 4 else I8
    offsets = None if part.offsets is None else part.offsets[None]
    return StoredMatrix(kind.value, columns, codes, part.scales[None], group_size, offsets)


def _paired(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] uint8, 0 to 15 -> [1, N, runs * 32], in StoredMatrix's layout."""
    runs = pad(codes, (0, -codes.shape[1] % PAIRED)).unflatten(1, (-1, PAIRED))
    return (runs[..., :HALF] | runs[..., HALF:] << 4).flatten(1)[None]


def empty_stack(like: StoredMatrix, count: int, device: torch.device) -> StoredMatrix:
    """Allocate `count` matrices of the format and shape of `like`."""
    return like.with_tensors(
        [
            None if each is None else torch.empty(count, *each.shape[1:], dtype=each.dtype, device=device)
            for each in like.tensors
        ]
    )


def put(stack: StoredMatrix, index: int, matrix: StoredMatrix) -> None:
    """Copy `matrix`, a stack of one, to `index`. Raises ModelLoadError for another format."""
    if (stack.kind, stack.group_size, stack.offsets is None) != (
        matrix.kind,
        matrix.group_size,
        matrix.offsets is None,
    ):
        raise ModelLoadError("the experts of a layer are quantised in different formats")
    for target, source in zip(stack.tensors, matrix.tensors, strict=True):
        if target is not None and source is not None:
            # torch cannot index_copy float8 on a CPU; bytes work.
            target[index].view(torch.uint8).copy_(source[0].contiguous().view(torch.uint8))
