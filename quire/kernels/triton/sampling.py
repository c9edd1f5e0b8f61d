"""Token choice in one pass over the logits: best token, or one sampled from all. `scan` leaves each
segment's largest score, its token, and the sum of weights relative to it. `pick` chooses segment and token by the
inverse cumulative distribution in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import launch, next_power_of_2
from quire.kernels.triton.sampling_core import LOWEST, draw_within, position_of, uniform, weigh
from quire.kernels.triton.sampling_shapes import Histories, SamplingBuffers, SamplingShapes
from quire.kernels.triton.sampling_words import (
    FEATURES,
    SEED,
    TEMPERATURE,
    load_bits,
    load_float,
    load_integer,
)


@triton.jit
def _scan_kernel(
    logits,
    rows,
    words,
    maxima,
    tokens,
    sums,
    lane_maxima,
    logits_stride,
    words_stride,
    VOCAB: tl.constexpr,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
):
    segment = tl.program_id(0)
    index = tl.program_id(1).to(tl.int64)
    chunks = tl.arange(0, SEGMENT // LANES)
    lanes = tl.arange(0, LANES)
    token = segment * SEGMENT + chunks[:, None] * LANES + lanes[None, :]
    mask = token < VOCAB
    loaded = tl.load(logits + index * logits_stride + token, mask=mask, other=0).to(tl.float32)
    is_sound = loaded < float("inf")  # neither infinite nor NaN
    scores = tl.where(mask & is_sound, loaded, float("-inf"))
    highest = tl.max(scores, 0)
    largest = tl.max(highest, 0)
    best = tl.min(tl.min(tl.where(mask & (scores == largest), token, VOCAB), 0), 0)
    is_nonfinite = tl.max(tl.max((mask & (loaded >= float("inf")) | (loaded != loaded)).to(tl.int32), 0), 0)
    place = index * tl.num_programs(0) + segment
    tl.store(maxima + place, largest)
    tl.store(tokens + place, tl.where(is_nonfinite > 0, -1, best))
    row_words = words + tl.load(rows + index).to(tl.int64) * words_stride
    if RANDOM:
        temperature = load_float(row_words, TEMPERATURE)
        if temperature > 0:
            # All weights of a segment without possible tokens are 0.
            weights = weigh(scores, tl.maximum(largest, LOWEST), temperature)
            tl.store(sums + place, tl.sum(tl.sum(weights, 0), 0))
    if FILTERED:  # noqa: SIM102 (this one is decided by the compiler, the next on the device)
        if (load_integer(row_words, FEATURES) & FILTERED) != 0:
            tl.store(lane_maxima + place * LANES + lanes, highest)


@triton.jit
def finish_row(token, is_sound, index, position, token_table, chosen, table_stride, row):
    """Write a row's chosen token to the results and, at `position`, to the token table. An unsound row gets token 0."""
    token = tl.where(is_sound, token, 0)
    tl.store(chosen + index * 2, token)
    tl.store(chosen + index * 2 + 1, is_sound.to(tl.int32))
    tl.store(token_table + row * table_stride + position, token)


@triton.jit
def _pick_kernel(
    logits,
    rows,
    words,
    lengths,
    num_prompt_tokens,
    maxima,
    tokens,
    sums,
    token_table,
    chosen,
    logits_stride,
    words_stride,
    table_stride,
    VOCAB: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    row_words = words + row * words_stride
    if (load_integer(row_words, FEATURES) & FILTERED) == 0:
        segments = tl.arange(0, SEGMENTS)
        mask = segments < NUM_SEGMENTS
        place = index * NUM_SEGMENTS + segments
        highest = tl.load(maxima + place, mask=mask, other=float("-inf"))
        best = tl.load(tokens + place, mask=mask, other=VOCAB)
        largest = tl.max(highest)
        is_sound = (tl.min(best) >= 0) & (largest > float("-inf"))
        token = tl.min(tl.where(highest == largest, best, VOCAB))
        position = tl.load(lengths + index)
        if RANDOM:
            temperature = load_float(row_words, TEMPERATURE)
            if (temperature > 0) & is_sound:
                shares = weigh(highest, largest, temperature).to(tl.float64)
                masses = tl.load(sums + place, mask=mask, other=0).to(tl.float64) * shares
                cumulative = tl.cumsum(masses, 0)
                total = tl.max(cumulative)
                number = position - tl.load(num_prompt_tokens + index)
                target = uniform(load_bits(row_words, SEED), number.to(tl.int64)) * total
                segment = position_of(cumulative, masses, target, SEGMENTS)
                before = tl.max(tl.where(segments < segment, cumulative, 0))
                likeliest = tl.load(tokens + index * NUM_SEGMENTS + segment)
                start = segment * SEGMENT
                end = tl.minimum(start + SEGMENT, VOCAB)
                line = logits + index * logits_stride
                target -= before
                token = draw_within(line, start, end, likeliest, target, 0.0, largest, temperature, TILE)
        finish_row(token, is_sound, index, position, token_table, chosen, table_stride, row)


def scan(
    logits: torch.Tensor,
    rows: torch.Tensor,
    words: torch.Tensor,
    buffers: SamplingBuffers,
    shapes: SamplingShapes,
    *,
    random: bool,
    filtered: int,
) -> None:
    """Reduce each segment of each row. logits: [R, vocab_size], bfloat16, float16 or float32, contiguous rows. rows:
    [R] int32, index in `words` ([num_rows, NUM_WORDS] int32). random: compute sums of weights. filtered: feature of
    filtered rows, which get lane maxima; 0: none."""
    count, vocab_size = logits.shape
    launch(
        _scan_kernel,
        (shapes.num_segments(vocab_size), count),
        logits,
        rows,
        words,
        buffers.maxima,
        buffers.tokens,
        buffers.sums,
        buffers.lane_maxima,
        logits.stride(0),
        words.stride(0),
        vocab_size,
        RANDOM=random,
        FILTERED=filtered,
        SEGMENT=shapes.segment,
        LANES=shapes.lanes,
        num_warps=shapes.num_warps,
    )


def pick(
    logits: torch.Tensor,
    rows: torch.Tensor,
    words: torch.Tensor,
    histories: Histories,
    buffers: SamplingBuffers,
    shapes: SamplingShapes,
    *,
    random: bool,
    filtered: int,
) -> None:
    """Choose each unfiltered row's token from the results of `scan`; write it to `buffers.chosen` and, at the row's
    length, to the token table."""
    count, vocab_size = logits.shape
    num_segments = shapes.num_segments(vocab_size)
    launch(
        _pick_kernel,
        (count,),
        logits,
        rows,
        words,
        histories.lengths,
        histories.num_prompt_tokens,
        buffers.maxima,
        buffers.tokens,
        buffers.sums,
        histories.token_table,
        buffers.chosen,
        logits.stride(0),
        words.stride(0),
        histories.token_table.stride(0),
        vocab_size,
        num_segments,
        RANDOM=random,
        FILTERED=filtered,
        SEGMENT=shapes.segment,
        SEGMENTS=next_power_of_2(num_segments),
        TILE=shapes.tile,
        num_warps=8,
    )
