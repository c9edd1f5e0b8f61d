"""Shared functions of the attention kernels: softmax over a range of a sequence's keys, block by block, and its
merging. A tile of queries is BLOCK_M rows: consecutive new tokens of one sequence times GROUP query heads. Keys come in
tiles at multiples of BLOCK_N. Unseen keys weigh zero, so a row's result does not depend on its tile. Exponentials are
powers of two."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.arguments import LayerAttention
from quire.kernels.triton.float8 import operand, widen_pairs
from quire.kernels.triton.runtime import bound, dot

NOTHING = tl.constexpr(-1.0e30)
"""Maximum of a row without keys; finite, so no difference is NaN."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_seen(position, window, WINDOW: tl.constexpr):
    """First position (possibly < 0) that tokens at these positions see."""
    if WINDOW == 2:
        first = position // window * window
    else:
        first = position - window + 1
    return first


def score_constants(layer: LayerAttention) -> tuple[float, float, int]:
    """`scale` and `cap` (base-2 units; 0: none) and `window` (0: all) for the kernels."""
    log2_e = LOG2_E.value
    if layer.soft_cap is None:
        return layer.stored_scale * log2_e, 0.0, layer.window or 0
    return 2 * layer.stored_scale / layer.soft_cap * log2_e, layer.soft_cap * log2_e, layer.window or 0


@triton.jit
def row_tokens(BLOCK_M: tl.constexpr, GROUP: tl.constexpr):
    """Token and head of each row in the tile, [BLOCK_M] each, and whether the row is used (GROUP may not divide
    BLOCK_M)."""
    row = tl.arange(0, BLOCK_M)
    token = row // GROUP
    return token, row % GROUP, token < BLOCK_M // GROUP


@triton.jit
def load_queries(
    query,
    query_stride,
    first_token,
    num_tokens,
    kv_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """[BLOCK_M, DIM]: rows of `num_tokens` tokens from `first_token` on, zeros elsewhere."""
    token, head, inside = row_tokens(BLOCK_M, GROUP)
    dims = tl.arange(0, DIM)
    at = (first_token + token).to(tl.int64) * query_stride + (kv_head * GROUP + head) * HEAD_DIM
    mask = (inside & (token < num_tokens))[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(query + at[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def split_queries(queries, ELEMENT: tl.constexpr, PAIRS: tl.constexpr):
    """Queries to multiply with page elements, odd half, and factor of the scores. With pairs
    (`float8.as_pairs`) halves are even and odd dims, float16 [BLOCK_M, DIM / 2] each, and the factor, [BLOCK_M, 1],
    undoes a power of two that scales rows below 2."""
    if PAIRS:
        wide = queries.to(tl.float32)
        bits = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000
        # The minimum serves rows of zeros and rows too small for the power to have an inverse.
        factor = tl.maximum(bits.to(tl.float32, bitcast=True), 1.0e-30)[:, None]
        if queries.dtype != tl.float32:
            wide = (wide / factor).to(tl.float16)
        else:
            factor = tl.zeros_like(factor) + 1.0
        first, second = tl.split(tl.reshape(wide, (wide.shape[0], wide.shape[1] // 2, 2)))
    else:
        first, factor = operand(queries, ELEMENT), 1.0
        second = first
    return first, second, factor


@triton.jit
def no_keys(BLOCK_M: tl.constexpr, DIM: tl.constexpr):
    """Maximum and sum of weights ([BLOCK_M]) and weighted values ([BLOCK_M, DIM]) before the first key."""
    maximum = tl.full((BLOCK_M,), NOTHING, tl.float32)
    return maximum, tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, DIM), tl.float32)


@triton.jit
def _blocks_of(table, tile, stop, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Physical blocks of a tile's keys before `stop`: one, or [BLOCK_N] if blocks are smaller than a tile."""
    if BLOCK_SIZE >= BLOCK_N:
        blocks = tl.load(table + tile // BLOCK_SIZE, mask=tile < stop, other=0)
    else:
        offsets = tl.arange(0, BLOCK_N)
        logical = table + tile // BLOCK_SIZE + offsets // BLOCK_SIZE
        blocks = tl.load(logical, mask=tile + offsets < stop, other=0)
    return blocks


@triton.jit
def _key_offsets(blocks, tile, TOKEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N] int64: offsets of a tile's keys in pages with TOKEN elements per position."""
    offsets = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE >= BLOCK_N:
        within = tile % BLOCK_SIZE + offsets
    else:
        within = offsets % BLOCK_SIZE
    return blocks.to(tl.int64) * (2 * BLOCK_SIZE * TOKEN) + within * TOKEN


@triton.jit
def _weigh(scores, visible, maximum, scale, cap, SOFT_CAP: tl.constexpr, MASKED: tl.constexpr):
    """Weights of a tile's keys relative to the new maximum, that maximum, and the factor of earlier sums. scale: factor
    of scores; with a soft cap c it includes 2 log2(e) / c. cap: c log2(e)."""
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (e^2x + 1), right at both ends.
        scores = tl.fma(-2.0, 1.0 / (tl.exp2(scores * scale) + 1.0), 1.0)
        scale = cap
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -new_maximum[:, None]))
    return weights, new_maximum, tl.exp2(maximum - new_maximum)


@triton.jit
def _attend_tiles(
    queries,
    odd_queries,
    query_factor,
    maximum,
    total,
    values,
    odd_values,
    pages,
    table,
    start,
    stop,
    first_key,
    end_key,
    positions,
    lasts,
    scale,
    cap,
    window,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PAIRS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add to the softmax the tiles that begin in [start, stop). Without MASKED, every row sees every key. PAIRS:
    operands are halves (`split_queries`)."""
    # Elements of a head: numbers, or pairs of them.
    WIDTH: tl.constexpr = HEAD_DIM // 2 if PAIRS else HEAD_DIM
    TOKEN: tl.constexpr = NUM_KV_HEADS * WIDTH
    VALUES: tl.constexpr = BLOCK_SIZE * TOKEN
    dims = tl.arange(0, DIM // 2 if PAIRS else DIM)
    blocks = _blocks_of(table, start, stop, BLOCK_SIZE, BLOCK_N)
    for tile in range(bound(start), bound(stop), BLOCK_N):
        keys = tile + tl.arange(0, BLOCK_N)
        present = (keys >= first_key) & (keys < end_key)
        at = _key_offsets(blocks, tile, TOKEN, BLOCK_SIZE, BLOCK_N)
        blocks = _blocks_of(table, tile + BLOCK_N, stop, BLOCK_SIZE, BLOCK_N)
        from_page = pages + at[:, None] + dims[None, :]
        visible = keys[None, :] <= lasts[:, None]
        if WINDOW:
            visible = visible & (keys[None, :] >= first_seen(positions, window, WINDOW)[:, None])
        if MASKED:
            mask = present[:, None] & (dims < WIDTH)[None, :]
            key = tl.load(from_page, mask=mask, other=0.0)
            value = tl.load(from_page + VALUES, mask=mask, other=0.0)
        elif DIM != HEAD_DIM:
            key = tl.load(from_page, mask=(dims < WIDTH)[None, :], other=0.0)
            value = tl.load(from_page + VALUES, mask=(dims < WIDTH)[None, :], other=0.0)
        else:
            key = tl.load(from_page)
            value = tl.load(from_page + VALUES)
        scores = tl.zeros((queries.shape[0], BLOCK_N), tl.float32)
        if PAIRS:
            even, odd = widen_pairs(key, queries.dtype)
            scores = dot(queries, tl.trans(even), scores)
            scores = dot(odd_queries, tl.trans(odd), scores) * query_factor
        else:
            scores = dot(queries, tl.trans(key.to(queries.dtype)), scores)
        weights, maximum, factor = _weigh(scores, visible, maximum, scale, cap, SOFT_CAP, MASKED)
        total = tl.fma(total, factor, tl.sum(weights, 1))
        weights = weights.to(queries.dtype)
        if PAIRS:
            even, odd = widen_pairs(value, queries.dtype)
            values = dot(weights, even, values * factor[:, None])
            odd_values = dot(weights, odd, odd_values * factor[:, None])
        else:
            values = dot(weights, value.to(queries.dtype), values * factor[:, None])
    return maximum, total, values, odd_values


@triton.jit
def attend_range(
    queries,
    odd_queries,
    query_factor,
    maximum,
    total,
    values,
    pages,
    table,
    start,
    stop,
    first_position,
    last_position,
    last_key,
    positions,
    lasts,
    scale,
    cap,
    window,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Add the keys at [start, stop) to a tile's running softmax; `start` is a multiple of BLOCK_N. queries,
    odd_queries, query_factor: from `split_queries`. pages: the layer's, at the key head's first element. table:
    sequence's row. positions: [BLOCK_M], first_position to last_position. lasts: [BLOCK_M], last position each row
    sees; last_key: largest."""
    odd_values = total
    if PAIRS:
        values, odd_values = tl.split(tl.reshape(values, (values.shape[0], DIM // 2, 2)))
    end = tl.minimum(stop, last_key + 1)
    first_key = start
    whole_from = start
    if WINDOW:
        first_key = tl.maximum(first_seen(first_position, window, WINDOW), 0)
        start = tl.maximum(start, first_key // BLOCK_N * BLOCK_N)
        whole_from = tl.maximum(
            start, tl.cdiv(tl.maximum(first_seen(last_position, window, WINDOW), 0), BLOCK_N) * BLOCK_N
        )
        left = tl.minimum(whole_from, end)
        maximum, total, values, odd_values = _attend_tiles(
            queries, odd_queries, query_factor, maximum, total, values, odd_values, pages, table, start, left,
            first_key, end, positions, lasts, scale, cap, window, NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N,
            WINDOW, SOFT_CAP, PAIRS, True,
        )  # fmt: skip
    whole_to = tl.maximum(whole_from, tl.minimum(end, first_position + 1) // BLOCK_N * BLOCK_N)
    maximum, total, values, odd_values = _attend_tiles(
        queries, odd_queries, query_factor, maximum, total, values, odd_values, pages, table, whole_from, whole_to,
        first_key, end, positions, lasts, scale, cap, window, NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, WINDOW,
        SOFT_CAP, PAIRS, False,
    )  # fmt: skip
    maximum, total, values, odd_values = _attend_tiles(
        queries, odd_queries, query_factor, maximum, total, values, odd_values, pages, table, whole_to, end, first_key,
        end, positions, lasts, scale, cap, window, NUM_KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, WINDOW, SOFT_CAP,
        PAIRS, True,
    )  # fmt: skip
    if PAIRS:
        values = tl.reshape(tl.join(values, odd_values), (values.shape[0], DIM))
    return maximum, total, values


@triton.jit
def merged(maximum, total, values, part_maximum, part_total, part_values):
    """Softmax over the keys of both parts. Merging an empty part changes no bit. values: [rows, dims]."""
    new_maximum = tl.maximum(maximum, part_maximum)
    old, new = tl.exp2(maximum - new_maximum), tl.exp2(part_maximum - new_maximum)
    total = tl.fma(part_total, new, total * old)
    values = tl.fma(part_values, tl.broadcast_to(new[:, None], values.shape), values * old[:, None])
    return new_maximum, total, values


@triton.jit
def load_sinks(sinks, heads, SINKS: tl.constexpr):
    """[rows] float32, per row's query head; -inf without sinks."""
    if SINKS:
        found = tl.load(sinks + heads).to(tl.float32)
    else:
        found = tl.full(heads.shape, float("-inf"), tl.float32)
    return found


@triton.jit
def normalised(maximum, total, values, sink, value_scale):
    """Divide by the sum of weights, sink included. sink: [rows], natural units; -inf for none. value_scale: factor of
    stored values."""
    new_maximum = tl.maximum(maximum, sink * LOG2_E)
    factor = tl.exp2(maximum - new_maximum)
    total = tl.fma(total, factor, tl.exp2(tl.fma(sink, LOG2_E, -new_maximum)))
    return values * (factor / total * value_scale)[:, None]


@triton.jit
def store_rows(
    out,
    out_stride,
    values,
    first_token,
    num_tokens,
    kv_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Store a tile's rows to the tokens and heads from which `load_queries` took them."""
    token, head, inside = row_tokens(BLOCK_M, GROUP)
    dims = tl.arange(0, DIM)
    at = (first_token + token).to(tl.int64) * out_stride + (kv_head * GROUP + head) * HEAD_DIM
    mask = (inside & (token < num_tokens))[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + at[:, None] + dims[None, :], values.to(out.dtype.element_ty), mask=mask)
