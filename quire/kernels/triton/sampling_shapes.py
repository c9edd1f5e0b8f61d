"""The division of a row among the sampling kernels' programs, and the memory in which one kernel leaves results for the
next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class SamplingShapes:
    """Powers of two, the same for every batch: a row's sums and so its draws depend on them in the last bits.

    segment: tokens that one program of `scan` holds in registers (32 for each of 256 threads: 64 bytes of bfloat16 a
    thread in flight, two programs a multiprocessor). lanes: a row's tokens t with equal t % lanes are a lane; maxima of
    lanes are what filters estimate thresholds from. tile: tokens looked at together inside a segment. listed: most
    tokens of a row that are ranked in registers. ranked: up to this rank lane maxima lead to a list that is short
    enough: the r largest maxima of L lanes are reached by about L * log(L / (L - r)) tokens, 2,800 for 960 of 1,024.
    """

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
    """The tokens of R rows. lengths: [R] int32, how many there are. num_prompt_tokens: [R] int32. token_table:
    [num_rows, capacity] int32, of all rows."""

    lengths: torch.Tensor
    num_prompt_tokens: torch.Tensor
    token_table: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingBuffers:
    """Results that one sampling kernel leaves for the next, of R rows of S segments. Tensors that a batch does not use
    are empty.

    chosen: [R, 2] int32, the token and whether the row is sound. maxima, sums: [R, S] float32, tokens: [R, S] int32, of
    `scan`: largest score, sum of weights relative to it, and the score's first token, -1 for a segment with NaN or plus
    infinity.
    For filters: lane_maxima: [R, S, lanes] float32. cutoffs: [R, 3] float32, the row's largest score, the lowest weight
    listed, and the lowest weight that stays. counts: [R, S] int32, masses: [R, S] float64, of `collect`: tokens listed
    and sum of all weights. lists: [R, S, listed] int16, places inside the segment, in order.
    """

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
    """The buffers of one batch; the allocator hands them out in the order of the stream."""
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
