"""Division of a row among the sampling kernels' programs, and the buffers between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class SamplingShapes:
    """Sizes (powers of two), fixed, as a row's sums depend on them. segment: tokens per program of `scan`. lanes:
    tokens with equal t % lanes form a lane. tile: tokens examined together in a segment. listed: maximum tokens of a
    row ranked in registers. ranked: maximum rank found by lane maxima."""

    segment: int = 8192
    lanes: int = 1024
    tile: int = 2048
    listed: int = 4096
    ranked: int = 960
    num_warps: int = 8

    def __post_init__(self) -> None:
        for size in (self.segment, self.lanes, self.tile, self.listed):
            assert size > 0, "sizes are positive"
            assert size & (size - 1) == 0, "sizes are powers of two"
        assert self.lanes <= self.segment <= 2**15, "a segment holds whole lanes, and its offsets fit 16 bits"
        assert 0 < self.ranked < self.lanes, "a rank beyond the lanes says nothing"

    def num_segments(self, vocab_size: int) -> int:
        return -(-vocab_size // self.segment)


class Histories(NamedTuple):
    """Tokens of R rows. lengths: [R] int32. num_prompt_tokens: [R] int32. token_table: [num_rows, capacity] int32, of
    all rows."""

    lengths: torch.Tensor
    num_prompt_tokens: torch.Tensor
    token_table: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingBuffers:
    """Results between sampling kernels, for R rows of S segments; unused tensors are empty. chosen: [R, 2] int32, token
    and whether the row is sound. maxima, sums: [R, S] float32, tokens: [R, S] int32, from `scan`: largest score,
    relative sum of weights, and the score's first token, -1 for NaN or plus infinity. lane_maxima: [R, S, lanes]
    float32. cutoffs: [R, 3] float32: largest score, lowest weights listed and kept. counts: [R, S] int32,
    masses: [R, S] float64, from `collect`. lists: [R, S, listed] int16, places in the segment, in order."""

    chosen: torch.Tensor
    maxima: torch.Tensor
    tokens: torch.Tensor
    sums: torch.Tensor
    lane_maxima: torch.Tensor
    cutoffs: torch.Tensor
    counts: torch.Tensor
    masses: torch.Tensor
    lists: torch.Tensor


def allocate_buffers(
    num_rows: int, vocab_size: int, shapes: SamplingShapes, device: torch.device, *, filtered: bool
) -> SamplingBuffers:
    """Buffers of one batch, allocated in stream order."""
    num_segments = shapes.num_segments(vocab_size)
    segments = (num_rows, num_segments)
    some = (num_rows, num_segments) if filtered else (0, 0)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return SamplingBuffers(
        chosen=empty((num_rows, 2), torch.int32),
        maxima=empty(segments, torch.float32),
        tokens=empty(segments, torch.int32),
        sums=empty(segments, torch.float32),
        lane_maxima=empty((*some, shapes.lanes), torch.float32),
        cutoffs=empty((some[0], 3), torch.float32),
        counts=empty(some, torch.int32),
        masses=empty(some, torch.float64),
        lists=empty((*some, shapes.listed), torch.int16),
    )
