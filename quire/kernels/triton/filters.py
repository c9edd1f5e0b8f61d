"""top-k, top-p and min-p without sorting: find the lowest kept weight, then sample. Equal weights stay or go together.
With C(v) and S(v), number and sum of the weights >= v, it is the largest of the largest v with C(v) >= k (top-k), the
largest v with S(v) >= p * mass (top-p, mass of what top-k leaves), and min-p. C and S are monotonic, so v is found by
bisecting its bits. To read the row once, `cutoff` takes the r-th largest of its 1,024 lane maxima (from `scan`), which
bounds a short list of weights; `collect` lists their tokens and sums all weights in float64; `pick_filtered` ranks the
list. If it is too long or misses the share, ten to twenty passes rank the row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import INTERPRETED, launch, next_power_of_2
from quire.kernels.triton.sampling import finish_row
from quire.kernels.triton.sampling_core import ONE, draw_within, load_scores, load_weights, position_of, uniform, weigh
from quire.kernels.triton.sampling_shapes import Histories, SamplingBuffers, SamplingShapes
from quire.kernels.triton.sampling_words import (
    FEATURES,
    MIN_P,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    load_bits,
    load_double,
    load_float,
    load_integer,
)

PIVOTS = tl.constexpr(8)
"""Values of v tried per pass over a row or round over a list."""


@triton.jit
def _add_four(a1, a2, a3, a4, b1, b2, b3, b4):
    return a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def _sum_from(bits, amounts, value):
    return tl.sum(tl.where(bits >= value, amounts, 0).to(tl.float64))


@triton.jit
def _num_reached(bits, amounts, low, stride, goal):
    """Number of low + stride, ... low + 4 stride at which the amounts of bits >= it reach `goal`."""
    if INTERPRETED:
        # One reduction at a time: the interpreter reduces tuples in Python, element by element.
        s1, s2 = _sum_from(bits, amounts, low + stride), _sum_from(bits, amounts, low + 2 * stride)
        s3, s4 = _sum_from(bits, amounts, low + 3 * stride), _sum_from(bits, amounts, low + 4 * stride)
    else:
        s1, s2, s3, s4 = tl.reduce(
            (
                tl.where(bits >= low + stride, amounts, 0).to(tl.float64),
                tl.where(bits >= low + 2 * stride, amounts, 0).to(tl.float64),
                tl.where(bits >= low + 3 * stride, amounts, 0).to(tl.float64),
                tl.where(bits >= low + 4 * stride, amounts, 0).to(tl.float64),
            ),
            0,
            _add_four,
        )
    return (s1 >= goal).to(tl.int32) + (s2 >= goal).to(tl.int32) + (s3 >= goal).to(tl.int32) + (s4 >= goal).to(tl.int32)


@triton.jit
def _largest_reached(weights, amounts, goal):
    """Largest v > 0 at which the amounts of weights >= v reach `goal`; 0 if none. weights: [N] float32 in [0, 1];
    amounts: [N] float32, >= 0."""
    bits = weights.to(tl.int32, bitcast=True)
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0, tl.int32) + (ONE + 1)
    while high - low > 1:
        stride = tl.maximum((high - low) // (PIVOTS + 1), 1)
        num_reached = _num_reached(bits, amounts, low, stride, goal)
        num_reached += _num_reached(bits, amounts, low + 4 * stride, stride, goal)
        low += stride * num_reached
        high = tl.where(num_reached < PIVOTS, tl.minimum(low + stride, high), high)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def _largest_reached_by_passes(
    row, VOCAB: tl.constexpr, largest, temperature, goal, COUNTS: tl.constexpr, LANES: tl.constexpr
):
    """`_largest_reached` over a whole row. COUNTS: amounts are 1, else the weights."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0, tl.int32) + (ONE + 1)
    while high - low > 1:
        stride = tl.maximum((high - low) // (PIVOTS + 1), 1)
        pivots = low + stride * (tl.arange(0, PIVOTS) + 1)
        sums = tl.zeros([PIVOTS, LANES], tl.float64)
        for start in tl.range(0, VOCAB, LANES, loop_unroll_factor=4):
            tokens = start + tl.arange(0, LANES)
            mask = tokens < VOCAB
            weights = load_weights(row, tokens, mask, largest, temperature)
            bits = weights.to(tl.int32, bitcast=True)
            amounts = weights.to(tl.float64)
            if COUNTS:
                amounts = mask.to(tl.float64)
            sums += tl.where(bits[None, :] >= pivots[:, None], amounts[None, :], 0)
        num_reached = tl.sum((tl.sum(sums, 1) >= goal).to(tl.int32))
        low += stride * num_reached
        high = tl.where(num_reached < PIVOTS, tl.minimum(low + stride, high), high)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def _sums_above(row, VOCAB: tl.constexpr, largest, temperature, value, LANES: tl.constexpr):
    """Number and sum of the weights above `value`, and sum of those >= `value`. All float64."""
    counts = tl.zeros([LANES], tl.float64)
    above = tl.zeros([LANES], tl.float64)
    from_value = tl.zeros([LANES], tl.float64)
    for start in tl.range(0, VOCAB, LANES, loop_unroll_factor=4):
        tokens = start + tl.arange(0, LANES)
        weights = load_weights(row, tokens, tokens < VOCAB, largest, temperature)
        is_above = weights > value
        counts += is_above.to(tl.float64)
        above += tl.where(is_above, weights, 0).to(tl.float64)
        from_value += tl.where(weights >= value, weights, 0).to(tl.float64)
    return tl.sum(counts), tl.sum(above), tl.sum(from_value)


@triton.jit
def _cutoff_kernel(
    rows,
    words,
    lane_maxima,
    cutoffs,
    words_stride,
    VOCAB: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    FILTERED: tl.constexpr,
    LANES: tl.constexpr,
    RANKED: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row_words = words + tl.load(rows + index).to(tl.int64) * words_stride
    if (load_integer(row_words, FEATURES) & FILTERED) != 0:
        lanes = tl.arange(0, LANES)
        highest = tl.full([LANES], float("-inf"), tl.float32)
        for segment in range(NUM_SEGMENTS):
            place = (index * NUM_SEGMENTS + segment) * LANES + lanes
            highest = tl.maximum(highest, tl.load(lane_maxima + place))
        largest = tl.max(highest)
        top_k = load_integer(row_words, TOP_K)
        has_top_k = (top_k > 0) & (top_k < VOCAB)
        cutoff = load_float(row_words, MIN_P)
        if has_top_k | (load_double(row_words, TOP_P) < 1.0):
            rank = tl.where(has_top_k, top_k, RANKED)
            # List nothing (no weight is above 1) if the row cannot be ranked here.
            cutoff = tl.full([], 2.0, tl.float32)
            if (rank <= RANKED) & (largest > float("-inf")):
                weights = weigh(highest, largest, load_float(row_words, TEMPERATURE))
                cutoff = _largest_reached(weights, tl.full([LANES], 1.0, tl.float32), rank.to(tl.float64))
        tl.store(cutoffs + index * 3, largest)
        tl.store(cutoffs + index * 3 + 1, cutoff)


@triton.jit
def _collect_kernel(
    logits,
    rows,
    words,
    cutoffs,
    counts,
    masses,
    lists,
    logits_stride,
    words_stride,
    VOCAB: tl.constexpr,
    FILTERED: tl.constexpr,
    SEGMENT: tl.constexpr,
    LISTED: tl.constexpr,
    TILE: tl.constexpr,
):
    segment = tl.program_id(0)
    index = tl.program_id(1).to(tl.int64)
    row_words = words + tl.load(rows + index).to(tl.int64) * words_stride
    if (load_integer(row_words, FEATURES) & FILTERED) != 0:
        place = index * tl.num_programs(0) + segment
        largest = tl.load(cutoffs + index * 3)
        cutoff = tl.load(cutoffs + index * 3 + 1)
        line = logits + index * logits_stride
        temperature = load_float(row_words, TEMPERATURE)
        count = tl.full([], 0, tl.int32)
        mass = tl.full([], 0.0, tl.float64)
        for start in range(0, SEGMENT, TILE):
            offsets = start + tl.arange(0, TILE)
            tokens = segment * SEGMENT + offsets
            weights = load_weights(line, tokens, tokens < VOCAB, largest, temperature)
            is_listed = (weights >= cutoff) & (weights > 0)
            positions = count + tl.cumsum(is_listed.to(tl.int32), 0) - 1
            tl.store(lists + place * LISTED + positions, offsets.to(tl.int16), mask=is_listed & (positions < LISTED))
            count += tl.sum(is_listed.to(tl.int32))
            mass += tl.sum(weights.to(tl.float64))
        tl.store(counts + place, count)
        tl.store(masses + place, mass)


@triton.jit
def _listed_tokens(
    counts,
    lists,
    index,
    NUM_SEGMENTS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Row's listed tokens by segment, [LISTED] int32, -1 after the last; and their number."""
    places = tl.arange(0, LISTED)
    segments = tl.arange(0, SEGMENTS)
    # One load for all counts: separate loads would each wait for memory.
    all_counts = tl.load(counts + index * NUM_SEGMENTS + segments, mask=segments < NUM_SEGMENTS, other=0)
    tokens = tl.full([LISTED], -1, tl.int32)
    total = tl.full([], 0, tl.int32)
    for segment in range(NUM_SEGMENTS):
        place = index * NUM_SEGMENTS + segment
        count = tl.sum(tl.where(segments == segment, all_counts, 0))
        inside = places - total
        is_here = (inside >= 0) & (inside < count)
        offsets = tl.load(lists + place * LISTED + inside, mask=is_here, other=0)
        tokens = tl.where(is_here, segment * SEGMENT + offsets.to(tl.int32), tokens)
        total += count
    return tokens, total


@triton.jit
def _lowest_by_passes(row, VOCAB: tl.constexpr, largest, temperature, top_k, top_p, mass, LANES: tl.constexpr):
    """Lowest weight that top-k (0: off) and top-p keep, by passes over the row."""
    lowest = tl.full([], 0.0, tl.float32)
    if top_k > 0:
        goal = top_k.to(tl.float64)
        lowest = _largest_reached_by_passes(row, VOCAB, largest, temperature, goal, True, LANES)
        count, above, _ = _sums_above(row, VOCAB, largest, temperature, lowest, LANES)
        mass = above + (goal - count) * lowest.to(tl.float64)
    if top_p < 1.0:
        share = top_p * mass
        reached = _largest_reached_by_passes(row, VOCAB, largest, temperature, share, False, LANES)
        lowest = tl.maximum(lowest, reached)
    return lowest


@triton.jit
def _lowest_in_list(weights, amounts, top_k, top_p, mass, LISTED: tl.constexpr):
    """Lowest weight that top-k (0: off) and top-p keep, from a list of the largest weights, and whether the list
    reaches the row's share."""
    lowest = tl.full([], 0.0, tl.float32)
    reaches = top_p >= 0.0
    if top_k > 0:
        goal = top_k.to(tl.float64)
        lowest = _largest_reached(weights, tl.full([LISTED], 1.0, tl.float32), goal)
        is_above = weights > lowest
        missing = goal - tl.sum(is_above.to(tl.float64))
        mass = tl.sum(tl.where(is_above, amounts, 0)) + missing * lowest.to(tl.float64)
    if top_p < 1.0:
        share = top_p * mass
        lowest = tl.maximum(lowest, _largest_reached(weights, weights, share))
        reaches = (tl.sum(amounts) >= share) | (top_k > 0)
    return lowest, reaches


@triton.jit
def _pick_filtered_kernel(
    logits,
    rows,
    words,
    lengths,
    num_prompt_tokens,
    maxima,
    tokens,
    cutoffs,
    counts,
    masses,
    lists,
    token_table,
    chosen,
    logits_stride,
    words_stride,
    table_stride,
    VOCAB: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    FILTERED: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LANES: tl.constexpr,
    LISTED: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    row_words = words + row * words_stride
    if (load_integer(row_words, FEATURES) & FILTERED) != 0:
        segments = tl.arange(0, SEGMENTS)
        place = index * NUM_SEGMENTS + segments
        best = tl.load(tokens + place, mask=segments < NUM_SEGMENTS, other=VOCAB)
        highest = tl.load(maxima + place, mask=segments < NUM_SEGMENTS, other=float("-inf"))
        largest = tl.max(highest)
        is_sound = (tl.min(best) >= 0) & (largest > float("-inf"))
        token = tl.min(tl.where(highest == largest, best, VOCAB))
        position = tl.load(lengths + index)
        if is_sound:
            line = logits + index * logits_stride
            temperature = load_float(row_words, TEMPERATURE)
            top_k = load_integer(row_words, TOP_K)
            top_k = tl.where(top_k < VOCAB, tl.maximum(top_k, 0), 0)
            top_p = load_double(row_words, TOP_P)
            mass = tl.sum(tl.load(masses + place, mask=segments < NUM_SEGMENTS, other=0))
            cutoff = tl.load(cutoffs + index * 3 + 1)
            number = position - tl.load(num_prompt_tokens + index)
            fraction = uniform(load_bits(row_words, SEED), number.to(tl.int64))

            listed, count = _listed_tokens(counts, lists, index, NUM_SEGMENTS, SEGMENTS, SEGMENT, LISTED)
            weights = load_weights(line, listed, listed >= 0, largest, temperature)
            amounts = weights.to(tl.float64)
            lowest, reaches = _lowest_in_list(weights, amounts, top_k, top_p, mass, LISTED)
            # The list must be complete and reach as far as the filters do.
            is_enough = (count > 0) & (count <= LISTED) & (reaches | (cutoff == 0))
            min_p = load_float(row_words, MIN_P)
            if is_enough:
                lowest = tl.maximum(lowest, min_p)
                kept = tl.where(weights >= lowest, amounts, 0)
                cumulative = tl.cumsum(kept, 0)
                total = tl.max(cumulative)
                place_in_list = position_of(cumulative, kept, fraction * total, LISTED)
                token = tl.sum(tl.where(tl.arange(0, LISTED) == place_in_list, listed, 0))
            else:
                mass = tl.sum(tl.load(masses + place, mask=segments < NUM_SEGMENTS, other=0))
                lowest = _lowest_by_passes(line, VOCAB, largest, temperature, top_k, top_p, mass, LANES)
                lowest = tl.maximum(lowest, min_p)
                _, _, total = _sums_above(line, VOCAB, largest, temperature, lowest, LANES)
                target = fraction * total
                token = draw_within(line, 0, VOCAB, token, target, lowest, largest, temperature, TILE)
            tl.store(cutoffs + index * 3 + 2, lowest)
        finish_row(token, is_sound, index, position, token_table, chosen, table_stride, row)


@triton.jit(do_not_specialize_on_alignment=["targets", "rows"])
def _process_kernel(
    scores,
    targets,
    processed,
    rows,
    words,
    scores_stride,
    targets_stride,
    processed_stride,
    words_stride,
    VOCAB: tl.constexpr,
    FEATURE: tl.constexpr,
    FILTERED: tl.constexpr,
    IMPOSSIBLE: tl.constexpr,
    LANES: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row_words = words + tl.load(rows + index).to(tl.int64) * words_stride
    features = load_integer(row_words, FEATURES)
    if (features & FEATURE) != 0:
        row = scores + index * scores_stride
        place = processed + index * processed_stride
        lanes = tl.arange(0, LANES)
        temperature = load_float(row_words, TEMPERATURE)
        chosen = tl.load(row + tl.load(targets + index * targets_stride)).to(tl.float32)
        largest = chosen
        lowest = tl.full([], 0.0, tl.float32)
        is_filtered = (features & FILTERED) != 0
        if is_filtered:
            best = tl.full([LANES], float("-inf"), tl.float32)
            for start in range(0, VOCAB, LANES):
                best = tl.maximum(best, load_scores(row, start + lanes, start + lanes < VOCAB))
            largest = tl.max(best)
            top_k = load_integer(row_words, TOP_K)
            top_k = tl.where(top_k < VOCAB, tl.maximum(top_k, 0), 0)
            top_p = load_double(row_words, TOP_P)
            _, _, mass = _sums_above(row, VOCAB, largest, temperature, lowest, LANES)
            lowest = _lowest_by_passes(row, VOCAB, largest, temperature, top_k, top_p, mass, LANES)
            lowest = tl.maximum(lowest, load_float(row_words, MIN_P))
            # Sums in another order may round differently: keep the chosen token even at the edge.
            lowest = tl.minimum(lowest, weigh(chosen, largest, temperature))
        divisor = tl.where(temperature > 0, temperature, 1.0)
        # A row with contradictory rules has only impossible tokens.
        bound = tl.where(chosen > IMPOSSIBLE, IMPOSSIBLE, float("-inf"))
        for start in range(0, VOCAB, LANES):
            tokens = start + lanes
            mask = tokens < VOCAB
            values = load_scores(row, tokens, mask)
            is_left_out = values <= bound
            if is_filtered:
                is_left_out = is_left_out | (weigh(values, largest, temperature) < lowest)
            tl.store(place + tokens, tl.where(is_left_out, float("-inf"), values / divisor), mask=mask)


def process(
    scores: torch.Tensor,
    targets: torch.Tensor,
    processed: torch.Tensor,
    rows: torch.Tensor,
    words: torch.Tensor,
    features: tuple[int, int],
    impossible: float,
    lanes: int,
) -> None:
    """Logits of the sampled distribution: divided by temperature (greedy: 1), minus infinity for filtered and banned
    tokens. scores: [R, vocab_size]; targets: [R] int32, sampled tokens; processed: [R, vocab_size] float32, may be
    `scores`. features: bits of rows to write, and of filtered rows. impossible: banned tokens' scores are not above
    it."""
    launch(
        _process_kernel,
        (len(scores),),
        scores,
        targets,
        processed,
        rows,
        words,
        scores.stride(0),
        targets.stride(0),
        processed.stride(0),
        words.stride(0),
        scores.shape[1],
        FEATURE=features[0],
        FILTERED=features[1],
        IMPOSSIBLE=impossible,
        LANES=lanes,
        num_warps=8,
    )


def cutoff(
    rows: torch.Tensor,
    words: torch.Tensor,
    vocab_size: int,
    buffers: SamplingBuffers,
    shapes: SamplingShapes,
    filtered: int,
) -> None:
    """Estimate the weight down to which each filtered row must be listed. rows: [R] int32; filtered: feature of
    filtered rows."""
    launch(
        _cutoff_kernel,
        (len(rows),),
        rows,
        words,
        buffers.lane_maxima,
        buffers.cutoffs,
        words.stride(0),
        vocab_size,
        shapes.num_segments(vocab_size),
        FILTERED=filtered,
        LANES=shapes.lanes,
        RANKED=shapes.ranked,
        num_warps=4,
    )


def collect(
    logits: torch.Tensor,
    rows: torch.Tensor,
    words: torch.Tensor,
    buffers: SamplingBuffers,
    shapes: SamplingShapes,
    filtered: int,
) -> None:
    """Write to `buffers`, per segment of each row with a `Feature` in `filtered`: tokens whose weight reaches the
    cutoff, their number, and the sum of all weights."""
    count, vocab_size = logits.shape
    launch(
        _collect_kernel,
        (shapes.num_segments(vocab_size), count),
        logits,
        rows,
        words,
        buffers.cutoffs,
        buffers.counts,
        buffers.masses,
        buffers.lists,
        logits.stride(0),
        words.stride(0),
        vocab_size,
        FILTERED=filtered,
        SEGMENT=shapes.segment,
        LISTED=shapes.listed,
        TILE=shapes.tile,
        num_warps=shapes.num_warps,
        maxnreg=80,
    )


def pick_filtered(
    logits: torch.Tensor,
    rows: torch.Tensor,
    words: torch.Tensor,
    histories: Histories,
    buffers: SamplingBuffers,
    shapes: SamplingShapes,
    filtered: int,
) -> None:
    """Choose tokens of rows with top-k, top-p or min-p, where `sampling.pick` serves the others."""
    count, vocab_size = logits.shape
    num_segments = shapes.num_segments(vocab_size)
    launch(
        _pick_filtered_kernel,
        (count,),
        logits,
        rows,
        words,
        histories.lengths,
        histories.num_prompt_tokens,
        buffers.maxima,
        buffers.tokens,
        buffers.cutoffs,
        buffers.counts,
        buffers.masses,
        buffers.lists,
        histories.token_table,
        buffers.chosen,
        logits.stride(0),
        words.stride(0),
        histories.token_table.stride(0),
        vocab_size,
        num_segments,
        FILTERED=filtered,
        SEGMENT=shapes.segment,
        SEGMENTS=next_power_of_2(num_segments),
        LANES=shapes.lanes,
        LISTED=shapes.listed,
        TILE=shapes.tile,
        num_warps=8,
    )
