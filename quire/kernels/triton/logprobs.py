"""Log-probabilities of tokens, ranks, and best tokens of a row. A program reads its row once. Tokens t with
equal t % LANES form a lane, which keeps its best score, its token, and a sum of exponentials."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import launch
from quire.kernels.triton.sampling_core import LOWEST, load_scores
from quire.kernels.triton.sampling_words import FEATURES, load_integer

LANES = 4096


@triton.jit
def _scan_lanes(row, VOCAB: tl.constexpr, chosen, LANES: tl.constexpr):
    """Each lane's best score, its first token, relative sum of exponentials, entries above `chosen`, and whether a
    score is non-finite."""
    lanes = tl.arange(0, LANES)
    best = tl.full([LANES], float("-inf"), tl.float32)
    best_token = tl.minimum(lanes, VOCAB)
    sums = tl.zeros([LANES], tl.float32)
    num_above = tl.zeros([LANES], tl.int32)
    nonfinite = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, VOCAB, LANES, loop_unroll_factor=2):
        scores = load_scores(row, start + lanes, start + lanes < VOCAB)
        is_better = scores > best
        # Minus infinity minus itself would be NaN.
        reference = tl.maximum(best, LOWEST)
        decay = tl.exp(tl.minimum(scores, reference) - tl.maximum(scores, reference))
        sums = tl.where(is_better, sums * decay + 1, sums + decay)
        best_token = tl.where(is_better, start + lanes, best_token)
        best = tl.where(is_better, scores, best)
        num_above += (scores > chosen).to(tl.int32)
        nonfinite |= (scores < float("inf")).to(tl.int32) ^ 1
    return best, best_token, sums, num_above, nonfinite


@triton.jit
def _next_of_lane(row, VOCAB: tl.constexpr, lane, score, token, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """Lane's best entry after (score, token), by falling score, then rising token."""
    tokens = lane + LANES * tl.arange(0, DEPTH)
    scores = load_scores(row, tokens, tokens < VOCAB)
    is_behind = (scores < score) | ((scores == score) & (tokens > token))
    scores = tl.where(is_behind & (tokens < VOCAB), scores, float("-inf"))
    best = tl.max(scores)
    is_best = is_behind & (tokens < VOCAB) & (scores == best)
    return best, tl.min(tl.where(is_best, tokens, VOCAB))


@triton.jit(
    do_not_specialize=["num_best", "result_stride"],
    do_not_specialize_on_alignment=["targets", "rows"],
)
def _rank_kernel(
    logits,
    targets,
    rows,
    words,
    result,
    logits_stride,
    targets_stride,
    words_stride,
    result_stride,
    VOCAB: tl.constexpr,
    num_best,
    FEATURE: tl.constexpr,
    TARGETED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    is_wanted = True
    if FEATURE != 0:
        row_words = words + tl.load(rows + index).to(tl.int64) * words_stride
        is_wanted = (load_integer(row_words, FEATURES) & FEATURE) != 0
    if is_wanted:
        row = logits + index * logits_stride
        place = result + index * result_stride
        chosen = tl.full([], float("inf"), tl.float32)
        if TARGETED:
            target = tl.load(targets + index * targets_stride)
            chosen = tl.load(row + target).to(tl.float32)
        first, tokens, sums, num_above, nonfinite = _scan_lanes(row, VOCAB, chosen, LANES)
        largest = tl.max(first)
        is_sound = (tl.max(nonfinite) == 0) & (largest > float("-inf"))
        offset = tl.full([], 0.0, tl.float32)
        log_sum = tl.full([], 0.0, tl.float32)
        if NORMALIZED:
            offset = largest
            log_sum = tl.log(tl.sum(sums * tl.exp(first - largest)))
        if TARGETED:
            is_sound = is_sound & (chosen > float("-inf"))
            tl.store(place + 1, tl.sum(num_above) + 1)
            tl.store(place + 2, target)
            tl.store(place + 3, ((chosen - offset) - log_sum).to(tl.int32, bitcast=True))
        tl.store(place, is_sound.to(tl.int32))
        number = tl.full([], 0, tl.int32)
        while number < num_best:
            score = tl.max(first)
            token = tl.min(tl.where(first == score, tokens, VOCAB))
            tl.store(place + 4 + 2 * number, token)
            tl.store(place + 5 + 2 * number, ((score - offset) - log_sum).to(tl.int32, bitcast=True))
            lane = token % LANES
            following, following_token = _next_of_lane(row, VOCAB, lane, score, token, LANES, DEPTH)
            is_lane = tl.arange(0, LANES) == lane
            first = tl.where(is_lane, following, first)
            tokens = tl.where(is_lane, following_token, tokens)
            number += 1


@triton.jit
def _normalize_kernel(
    scores, rows, words, scores_stride, words_stride, VOCAB: tl.constexpr, FEATURE: tl.constexpr, LANES: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    row_words = words + tl.load(rows + index).to(tl.int64) * words_stride
    if (load_integer(row_words, FEATURES) & FEATURE) != 0:
        row = scores + index * scores_stride
        nothing = tl.full([], float("inf"), tl.float32)
        best, _, sums, _, _ = _scan_lanes(row, VOCAB, nothing, LANES)
        largest = tl.max(best)
        log_sum = tl.log(tl.sum(sums * tl.exp(best - largest)))
        for start in range(0, VOCAB, LANES):
            tokens = start + tl.arange(0, LANES)
            mask = tokens < VOCAB
            logprobs = (load_scores(row, tokens, mask) - largest) - log_sum
            tl.store(row + tokens, logprobs, mask=mask)


FIRST_PAIR = 2
"""Words of a result before its pairs: whether the row is finite, and the target's rank."""


def result_words(num_best: int) -> int:
    return FIRST_PAIR + 2 * (1 + num_best)


def rank(
    logits: torch.Tensor,
    targets: torch.Tensor | None,
    result: torch.Tensor,
    rows: torch.Tensor,
    words: torch.Tensor,
    feature: int = 0,
    lanes: int = LANES,
    *,
    normalized: bool,
) -> None:
    """Best tokens of each row, in order, ties by token id. logits: [N, vocab_size], bfloat16, float16 or float32,
    contiguous rows. targets: [N] int32, a token per row. normalized: values are log-probabilities, else logits. rows:
    [N] int32, words: parameter table; with `feature` != 0, only rows with it are written. result: [N,
    result_words(num_best)] int32: whether the row is sound; the target's rank, 1 for the best; then pairs (token,
    float32 bits) of the target and the best."""
    vocab_size = logits.shape[1]
    num_best = (result.shape[1] - FIRST_PAIR) // 2 - 1
    launch(
        _rank_kernel,
        (len(logits),),
        logits,
        targets,
        rows,
        words,
        result,
        logits.stride(0),
        0 if targets is None else targets.stride(0),
        words.stride(0),
        result.stride(0),
        vocab_size,
        num_best,
        FEATURE=feature,
        TARGETED=targets is not None,
        NORMALIZED=normalized,
        LANES=lanes,
        DEPTH=triton.next_power_of_2(triton.cdiv(vocab_size, lanes)),
        num_warps=16,
    )


def normalize(scores: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, feature: int, lanes: int = LANES) -> None:
    """Turn rows with `feature` into log-probabilities, in place. scores: [R, vocab_size] float32; rows: [R] int32, in
    `words`."""
    strides = (scores.stride(0), words.stride(0), scores.shape[1])
    launch(_normalize_kernel, (len(rows),), scores, rows, words, *strides, FEATURE=feature, LANES=lanes, num_warps=16)
