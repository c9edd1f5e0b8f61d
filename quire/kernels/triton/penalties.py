"""Repetition, presence and frequency penalties, counted from the token table in every step, in a borrowed
zero table, [R, vocab_size] int32; applying them restores the zeros."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import launch
from quire.kernels.triton.sampling_shapes import Histories
from quire.kernels.triton.sampling_words import (
    FREQUENCY_PENALTY,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    load_float,
)

IN_PROMPT = tl.constexpr(1 << 30)
"""Flag of prompt tokens in a count; the rest is the number of generated occurrences."""
BLOCK = 1024
PROGRAMS = 8
"""Programs that share a row's tokens; the host need not know their number."""


@triton.jit
def _count_kernel(
    rows,
    words,
    lengths,
    num_prompt_tokens,
    token_table,
    counts,
    words_stride,
    table_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    row_words = words + row * words_stride
    repeats = load_float(row_words, REPETITION_PENALTY) != 1
    outputs = (load_float(row_words, PRESENCE_PENALTY) != 0) | (load_float(row_words, FREQUENCY_PENALTY) != 0)
    prompt_end = tl.load(num_prompt_tokens + index)
    begin = tl.where(repeats, 0, prompt_end)
    end = tl.where(repeats | outputs, tl.load(lengths + index), 0)
    start = begin + tl.program_id(1) * BLOCK
    while start < end:
        positions = start + tl.arange(0, BLOCK)
        mask = positions < end
        tokens = tl.load(token_table + row * table_stride + positions, mask=mask, other=0)
        place = counts + index * vocab_size + tokens
        tl.atomic_or(place, IN_PROMPT, mask=mask & (positions < prompt_end), sem="relaxed")
        tl.atomic_add(place, 1, mask=mask & (positions >= prompt_end), sem="relaxed")
        start += tl.num_programs(1) * BLOCK


@triton.jit
def _apply_kernel(
    scores,
    rows,
    words,
    lengths,
    num_prompt_tokens,
    token_table,
    counts,
    scores_stride,
    words_stride,
    table_stride,
    vocab_size,
    IN_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    row_words = words + row * words_stride
    repetition = load_float(row_words, REPETITION_PENALTY)
    presence = load_float(row_words, PRESENCE_PENALTY)
    frequency = load_float(row_words, FREQUENCY_PENALTY)
    repeats = repetition != 1
    outputs = (presence != 0) | (frequency != 0)
    begin = tl.where(repeats, 0, tl.load(num_prompt_tokens + index))
    end = tl.where(repeats | outputs, tl.load(lengths + index), 0)
    start = begin + tl.program_id(1) * BLOCK
    while start < end:
        positions = start + tl.arange(0, BLOCK)
        mask = positions < end
        tokens = tl.load(token_table + row * table_stride + positions, mask=mask, other=0)
        count = tl.atomic_xchg(counts + index * vocab_size + tokens, 0, mask=mask, sem="relaxed")
        is_first = mask & (count != 0)
        times = count & (IN_PROMPT - 1)
        place = scores + index * scores_stride + tokens
        score = tl.load(place, mask=is_first, other=0)
        repeated = tl.where(score > 0, tl.div_rn(score, repetition), score * repetition)
        score = tl.where(repeats, repeated, score)
        score = tl.where(times > 0, score - (presence + frequency * times.to(tl.float32)), score)
        tl.store(place, score, mask=is_first)
        start += tl.num_programs(1) * BLOCK


def apply_penalties(
    scores: torch.Tensor,
    rows: torch.Tensor,
    words: torch.Tensor,
    histories: Histories,
    counts: torch.Tensor,
) -> None:
    """Apply each row's penalties in place. scores: [R, vocab_size] float32. rows: [R] int32, indices in `words`.
    counts: [>= R, vocab_size] int32, zeros before and after."""
    lengths, num_prompt_tokens, token_table = histories
    vocab_size = scores.shape[1]
    grid = (len(rows), PROGRAMS)
    strides = (words.stride(0), token_table.stride(0), vocab_size)
    launch(_count_kernel, grid, rows, words, lengths, num_prompt_tokens, token_table, counts, *strides, BLOCK=BLOCK)
    launch(
        _apply_kernel,
        grid,
        scores,
        rows,
        words,
        lengths,
        num_prompt_tokens,
        token_table,
        counts,
        scores.stride(0),
        *strides,
        IN_PROMPT=IN_PROMPT,
        BLOCK=BLOCK,
    )
