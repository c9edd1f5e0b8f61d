"""Rules on single tokens from lists: logit bias, bans before `min_tokens`, banned sequences, allowed tokens. All rows'
lists are in one int32 tensor (layout: `quire.sampling.lists`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import launch
from quire.kernels.triton.sampling_shapes import Histories
from quire.kernels.triton.sampling_words import MIN_TOKENS, load_integer
from quire.sampling import lists as layout

HEADER_WORDS = tl.constexpr(layout.HEADER_WORDS)
BIAS = tl.constexpr(layout.BIAS)
STOP = tl.constexpr(layout.STOP)
BANNED = tl.constexpr(layout.BANNED)
ALLOWED = tl.constexpr(layout.ALLOWED)
BANNED_SCORE = tl.constexpr(-1e30)
BLOCK = 256
FILL = 8192
"""Tokens of the vocabulary whose scores one program fills or masks."""


@triton.jit
def _list_of(lists, row, KIND: tl.constexpr):
    header = lists + row * HEADER_WORDS + 2 * KIND
    return tl.load(header), tl.load(header + 1)


@triton.jit
def _bias_kernel(scores, rows, lists, scores_stride, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    begin, size = _list_of(lists, tl.load(rows + index).to(tl.int64), BIAS)
    start = tl.full([], 0, tl.int32)
    while start < size:
        entries = start + tl.arange(0, BLOCK)
        mask = entries < size
        entry = lists + begin + 2 * entries
        tokens = tl.load(entry, mask=mask, other=0)
        bias = tl.load(entry + 1, mask=mask, other=0).to(tl.float32, bitcast=True)
        place = scores + index * scores_stride + tokens
        tl.store(place, tl.load(place, mask=mask, other=0) + bias, mask=mask)
        start += BLOCK


@triton.jit
def _ban(place, mask):
    """Lower scores to the banned one; minus infinity and NaN stay."""
    score = tl.load(place, mask=mask, other=0)
    tl.store(place, tl.full(score.shape, BANNED_SCORE, tl.float32), mask=mask & (score > BANNED_SCORE))


@triton.jit
def _stop_kernel(
    scores, rows, words, lengths, num_prompt_tokens, lists, scores_stride, words_stride, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    begin, size = _list_of(lists, row, STOP)
    num_generated = tl.load(lengths + index) - tl.load(num_prompt_tokens + index)
    size = tl.where(num_generated < load_integer(words + row * words_stride, MIN_TOKENS), size, 0)
    start = tl.full([], 0, tl.int32)
    while start < size:
        entries = start + tl.arange(0, BLOCK)
        mask = entries < size
        tokens = tl.load(lists + begin + entries, mask=mask, other=0)
        _ban(scores + index * scores_stride + tokens, mask)
        start += BLOCK


@triton.jit
def _banned_kernel(
    scores, rows, lengths, num_prompt_tokens, token_table, lists, scores_stride, table_stride, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    begin, size = _list_of(lists, row, BANNED)
    length = tl.load(lengths + index)
    num_generated = length - tl.load(num_prompt_tokens + index)
    start = tl.full([], 0, tl.int32)
    while start < size:
        entries = start + tl.arange(0, BLOCK)
        mask = entries < size
        entry = lists + begin + 3 * entries
        last = tl.load(entry, mask=mask, other=0)
        prefix_length = tl.load(entry + 1, mask=mask, other=0)
        prefix = tl.load(entry + 2, mask=mask, other=0)
        is_complete = mask & (prefix_length <= num_generated)
        longest = tl.max(tl.where(is_complete, prefix_length, 0))
        back = tl.full([], 0, tl.int32)
        while back < longest:
            is_compared = is_complete & (back < prefix_length)
            expected = tl.load(lists + prefix + prefix_length - 1 - back, mask=is_compared, other=0)
            place = token_table + row * table_stride + length - 1 - back + tl.zeros([BLOCK], tl.int32)
            is_same = expected == tl.load(place, mask=is_compared, other=0)
            is_complete = is_complete & (is_same | (back >= prefix_length))
            back += 1
        _ban(scores + index * scores_stride + last, is_complete)
        start += BLOCK


@triton.jit(do_not_specialize=["saved_stride"])
def _gather_kernel(scores, rows, lists, saved, scores_stride, saved_stride, SAVES: tl.constexpr, BLOCK: tl.constexpr):
    """Save or restore the scores of allowed tokens. saved: line per row of `scores`, as rows may share a list."""
    index = tl.program_id(0).to(tl.int64)
    begin, size = _list_of(lists, tl.load(rows + index).to(tl.int64), ALLOWED)
    own = saved + index * saved_stride
    start = tl.program_id(1) * BLOCK
    while start < size:
        entries = start + tl.arange(0, BLOCK)
        mask = entries < size
        place = scores + index * scores_stride + tl.load(lists + begin + entries, mask=mask, other=0)
        if SAVES:
            tl.store(own + entries, tl.load(place, mask=mask, other=0), mask=mask)
        else:
            tl.store(place, tl.load(own + entries, mask=mask, other=0), mask=mask)
        start += tl.num_programs(1) * BLOCK


@triton.jit
def _fill_kernel(scores, rows, lists, scores_stride, vocab_size, BLOCK: tl.constexpr):
    index = tl.program_id(1).to(tl.int64)
    _, size = _list_of(lists, tl.load(rows + index).to(tl.int64), ALLOWED)
    if size > 0:
        tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        impossible = tl.full([BLOCK], float("-inf"), tl.float32)
        tl.store(scores + index * scores_stride + tokens, impossible, mask=tokens < vocab_size)


@triton.jit
def _mask_kernel(scores, indices, words, scores_stride, words_stride, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    index = tl.load(indices + row).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = tokens < vocab_size
    word = tl.load(words + row * words_stride + tokens // 32, mask=exists, other=0)
    is_forbidden = ((word >> (tokens % 32)) & 1) == 0
    impossible = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(scores + index * scores_stride + tokens, impossible, mask=exists & is_forbidden)


def add_logit_bias(scores: torch.Tensor, rows: torch.Tensor, lists: torch.Tensor) -> None:
    """Add biases to tokens' scores. scores: [R, vocab_size] float32, modified in place; rows: [R] int32, indices in the
    header of `lists`."""
    launch(_bias_kernel, (len(rows),), scores, rows, lists, scores.stride(0), BLOCK=BLOCK)


def ban_stop_tokens(
    scores: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, histories: Histories, lists: torch.Tensor
) -> None:
    lengths, num_prompt_tokens, _ = histories
    strides = (scores.stride(0), words.stride(0))
    launch(_stop_kernel, (len(rows),), scores, rows, words, lengths, num_prompt_tokens, lists, *strides, BLOCK=BLOCK)


def ban_sequences(scores: torch.Tensor, rows: torch.Tensor, histories: Histories, lists: torch.Tensor) -> None:
    strides = (scores.stride(0), histories.token_table.stride(0))
    launch(_banned_kernel, (len(rows),), scores, rows, *histories, lists, *strides, BLOCK=BLOCK)


def keep_allowed(scores: torch.Tensor, rows: torch.Tensor, lists: torch.Tensor, longest: int) -> None:
    """Make all but the allowed tokens impossible, in rows that list some. longest: tokens of their longest list."""
    saved = torch.empty(len(rows), longest, dtype=torch.float32, device=scores.device)
    vocab_size, stride = scores.shape[1], scores.stride(0)
    grid = (len(rows), 8)
    launch(_gather_kernel, grid, scores, rows, lists, saved, stride, longest, SAVES=True, BLOCK=BLOCK)
    fill_grid = (triton.cdiv(vocab_size, FILL), len(rows))
    launch(_fill_kernel, fill_grid, scores, rows, lists, stride, vocab_size, BLOCK=FILL)
    launch(_gather_kernel, grid, scores, rows, lists, saved, stride, longest, SAVES=False, BLOCK=BLOCK)


def keep_masked(scores: torch.Tensor, indices: torch.Tensor, words: torch.Tensor) -> None:
    """Make tokens impossible outside a row's mask. indices: [M] int32, rows of `scores`. words: [M, W] int32, 32 tokens
    each."""
    vocab_size = scores.shape[1]
    grid = (triton.cdiv(vocab_size, FILL), len(indices))
    launch(_mask_kernel, grid, scores, indices, words, scores.stride(0), words.stride(0), vocab_size, BLOCK=FILL)
