"""Rows of a table by index, optionally added to others, and means of consecutive rows. Limit: memory bandwidth."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import blocks_of, bound, launch, narrow, next_power_of_2

BLOCK = 1024
MEAN_BLOCK = 128
"""Rows per program of the means; few, as a text's rows are added in order."""


@triton.jit
def _embedding_kernel(table, indices, out, num_table_rows, size, out_stride, ADDED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + row).to(tl.int64)
    inside = columns < size
    known = (index >= 0) & (index < num_table_rows)
    values = tl.load(table + index * size + columns, mask=inside & known, other=0.0)
    at = out + row * out_stride + columns
    if ADDED:
        summed = values.to(tl.float32) + tl.load(at, mask=inside, other=0.0).to(tl.float32)
        values = narrow(summed, out.dtype.element_ty)
    tl.store(at, values, mask=inside)


def embedding(table: torch.Tensor, indices: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of an embedding table. table: [N, size], contiguous. indices: [T] int32 or int64; others' rows are
    zeros. Returns [T, size] in the table's dtype: `onto` plus the rows, if given."""
    num_rows, size = len(indices), table.shape[1]
    out = torch.empty(num_rows, size, dtype=table.dtype, device=table.device) if onto is None else onto
    if num_rows == 0:
        return out
    assert table.is_contiguous(), "the table lies in one piece"
    assert out.stride(1) == 1, "the elements of a row lie side by side"
    block = min(BLOCK, triton.next_power_of_2(size))
    launch(
        _embedding_kernel,
        (num_rows, triton.cdiv(size, block)),
        table,
        indices,
        out,
        table.shape[0],
        size,
        out.stride(0),
        ADDED=onto is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out


@triton.jit
def _mean_kernel(x, starts, ends, out, size, x_stride, BLOCK: tl.constexpr):
    span = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(starts + span), tl.load(ends + span)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(bound(start), bound(end)):
        total += tl.load(x + tl.cast(row, tl.int64) * x_stride + columns, mask=columns < size, other=0.0).to(tl.float32)
    mean = narrow(total / (end - start).to(tl.float32), out.dtype.element_ty)
    tl.store(out + span.to(tl.int64) * size + columns, mean, mask=columns < size)


def mean_rows(x: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Means of runs of rows, for pooling. x: [T, size]. starts, ends: [P] int32. Returns [P, size]: over rows starts[p]
    to ends[p] - 1, added in order in float32."""
    num_spans, size = len(starts), x.shape[1]
    assert x.stride(1) == 1, "the elements of a row lie side by side"
    out = torch.empty(num_spans, size, dtype=x.dtype, device=x.device)
    block = min(MEAN_BLOCK, next_power_of_2(size))
    launch(_mean_kernel, (num_spans, blocks_of(size, block)), x, starts, ends, out, size, x.stride(0), BLOCK=block)
    return out
