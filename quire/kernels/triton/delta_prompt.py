"""Gated delta rule of prompts: what no state changes, for all chunks of BORDER tokens at once, then states in order.
Bits depend on where steps begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.attention.device_batch import DeviceStateStep
from quire.config.model_shape import STATE_BORDER
from quire.kernels.arguments import NORM_EPSILON, DeltaRule
from quire.kernels.triton.delta_common import BORDER, SMALLEST_TILE, step_of
from quire.kernels.triton.paged_attention import BATCH_COLUMNS
from quire.kernels.triton.runtime import blocks_of, bound, dot, launch, narrow, next_power_of_2

# In a chunk that begins with state C, updates are u = T (beta (v - exp(G) C' k)) (`layers/states.py`). T is the inverse
# of 1 + A; A holds beta_n exp(G_n - G_i) (k_n k_i) for i < n. Queries and keys are multiplied unnormalised, exact in
# bfloat16; float32 operands are split into bfloat16 parts: in one part the error exceeds that of a bfloat16 result.
LEAST_TOKENS = STATE_BORDER
"""Fewest new tokens of a sequence computed here: its first chunk then ends at a border."""
DOUBLINGS = tl.constexpr(STATE_BORDER.bit_length() - 1)
# Rows of factors: of values, results of keys and of queries with the state, updates that enter the state; the state's.
FACTORS = tl.constexpr(5)


@dataclass(frozen=True, slots=True)
class PromptTiles:
    """Tiles of both kernels. columns: a program's. chunk_registers: most (0: any)."""

    columns: int
    chunk_warps: int
    state_warps: int
    num_stages: int
    chunk_registers: int = 0


TILES = PromptTiles(32, 4, 4, 3)


@triton.jit
def _high(x):
    return narrow(x, tl.bfloat16)


@triton.jit
def _low(x):
    return narrow(x - narrow(x, tl.bfloat16).to(tl.float32), tl.bfloat16)


@triton.jit
def _mixed_product(plain, x, accumulator):
    # plain: bfloat16; x: float32
    accumulator = dot(plain, _high(x), accumulator)
    return dot(plain, _low(x), accumulator)


@triton.jit
def _wide_product(a, b, accumulator):
    high_a, high_b = _high(a), _high(b)
    accumulator = dot(_low(a), high_b, accumulator)
    accumulator = dot(high_a, _low(b), accumulator)
    return dot(high_a, high_b, accumulator)


@triton.jit
def _stored_product(matrix, x, accumulator, SIZE: tl.constexpr):
    # matrix: pointers to what `_store_matrix` wrote; x: float32
    first, high = tl.load(matrix), _high(x)
    accumulator = dot(first, high, accumulator)
    accumulator = dot(first, _low(x), accumulator)
    return dot(tl.load(matrix + SIZE), high, accumulator)


@triton.jit
def _store_matrix(to, matrix, SIZE: tl.constexpr):
    tl.store(to, _high(matrix))
    tl.store(to + SIZE, _low(matrix))


@triton.jit
def _first_slot(query_start, sequence):
    # n tokens are in at most n // BORDER + 2 chunks
    return tl.load(query_start + sequence) // BORDER + 2 * sequence


@triton.jit
def _sequence_of_slot(query_start, slot, num_seqs):
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _first_slot(query_start, middle) <= slot:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _inverse(a):
    """Inverse of 1 + a; a is nonzero below the diagonal only."""
    # Blocks of twice the size at a time: the inverse of [[B, 0], [C, D]] is that of B and D, and -D^-1 C B^-1.
    row, column = tl.arange(0, BORDER)[:, None], tl.arange(0, BORDER)[None, :]
    apart = row ^ column  # less than the size of the smallest block that both are in
    nothing = tl.zeros((BORDER, BORDER), tl.float32)
    inverse = tl.where(apart == 0, 1.0, tl.where(apart < 2, -a, 0.0))
    for level in range(1, DOUBLINGS):
        beside = tl.where((apart >= 1 << level) & (apart < 2 << level), a, 0.0)
        inner = _wide_product(beside, inverse, nothing)
        inverse -= _wide_product(inverse, inner, nothing)
    return inverse


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=BATCH_COLUMNS)
def _chunk_kernel(
    qkv, gates, decays, matrices, factors, query_start, seq_lens, num_seqs, qkv_stride, gates_stride, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr,
    EPSILON: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Program (slot, value head). matrices: [slots, VALUE_HEADS, 2, 2, BORDER, BORDER]; factors: [slots,
    VALUE_HEADS, FACTORS, BORDER]."""
    # Matrices: T, and what results take of updates.
    slot, head = tl.program_id(0), tl.program_id(1)
    sequence = _sequence_of_slot(query_start, slot, num_seqs)
    first, start, length = step_of(query_start, seq_lens, sequence)
    border = (start // BORDER + slot - _first_slot(query_start, sequence)) * BORDER
    if (length - start < LEAST) | (border >= length):
        return
    row, dims = tl.arange(0, BORDER), tl.arange(0, KEY_BLOCK)
    place = border + row
    is_new = (place >= start) & (place < length)
    token = (first + place - start).to(tl.int64)
    decay = tl.load(decays + token * VALUE_HEADS + head, mask=is_new, other=0.0)
    gate = tl.load(gates + token * gates_stride + head, mask=is_new, other=0.0).to(tl.float32)
    beta = tl.where(is_new, 1.0 / (tl.exp(-gate) + 1.0), 0.0)
    sums, whole = tl.cumsum(decay, 0), tl.sum(decay, 0)
    left = tl.exp(sums)
    fading = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
    at = qkv + token[:, None] * qkv_stride + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + dims[None, :]
    inside = is_new[:, None] & (dims < KEY_DIM)[None, :]
    query = tl.load(at, mask=inside, other=0.0)
    key = tl.load(at + KEY_HEADS * KEY_DIM, mask=inside, other=0.0)
    wide_query, wide_key = query.to(tl.float32), key.to(tl.float32)
    query_norm = tl.rsqrt(tl.sum(wide_query * wide_query, 1) + EPSILON) * scale
    key_norm = tl.rsqrt(tl.sum(wide_key * wide_key, 1) + EPSILON)
    index = slot.to(tl.int64) * VALUE_HEADS + head
    of_rows = factors + index * (FACTORS * BORDER) + row
    tl.store(of_rows, beta)
    tl.store(of_rows + BORDER, beta * left * key_norm)
    tl.store(of_rows + 2 * BORDER, left * query_norm)
    # A chunk that ends before its border leaves the state as it is.
    is_whole = border + BORDER <= length
    gone = tl.exp(tl.minimum(whole - sums, 0.0)) * key_norm
    tl.store(of_rows + 3 * BORDER, tl.where(is_whole, gone, 0.0))
    tl.store(of_rows + 4 * BORDER, tl.where(is_whole, tl.exp(whole), 1.0) + tl.zeros((BORDER,), tl.float32))
    nothing = tl.zeros((BORDER, BORDER), tl.float32)
    to = matrices + index * (4 * BORDER * BORDER) + row[:, None] * BORDER + row[None, :]
    to_query = dot(query, tl.trans(key), nothing) * query_norm[:, None] * key_norm[None, :]
    to_query = tl.where(row[None, :] <= row[:, None], to_query * fading, 0.0)
    _store_matrix(to + 2 * BORDER * BORDER, to_query, BORDER * BORDER)
    to_key = dot(key, tl.trans(key), nothing) * (beta * key_norm)[:, None] * key_norm[None, :]
    to_key = tl.where(row[None, :] < row[:, None], to_key * fading, 0.0)
    _store_matrix(to, _inverse(to_key), BORDER * BORDER)


@triton.jit
def _state_before(
    page, states, kept_updates, kept_keys, kept_decays, head, key_head, start, columns,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_LINE: tl.constexpr, VALUE_LINE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """State after `start` tokens, kept rows included."""
    row, dims = tl.arange(0, BORDER), tl.arange(0, KEY_BLOCK)
    is_dim, is_column = dims < KEY_DIM, columns < VALUE_DIM
    state_at = (head * KEY_DIM + dims)[:, None] * VALUE_LINE + columns[None, :]
    state = tl.load(states + page + state_at, mask=is_dim[:, None] & is_column[None, :] & (start > 0), other=0.0)
    if start % BORDER > 0:
        is_old = row < start % BORDER
        decay = tl.load(kept_decays + page + head * BORDER + row, mask=is_old, other=0.0)
        sums, whole = tl.cumsum(decay, 0), tl.sum(decay, 0)
        at = kept_keys + page + (key_head * (BORDER - 1) + row)[None, :] * KEY_LINE + dims[:, None]
        keys = tl.load(at, mask=is_old[None, :] & is_dim[:, None], other=0.0)
        at = kept_updates + page + (head * (BORDER - 1) + row)[:, None] * VALUE_LINE + columns[None, :]
        updates = tl.load(at, mask=is_old[:, None] & is_column[None, :], other=0.0)
        updates *= tl.exp(tl.minimum(whole - sums, 0.0))[:, None]
        state = _wide_product(keys, updates, state * tl.exp(whole))
    return state


@triton.jit(do_not_specialize=["interval", "table_stride"], do_not_specialize_on_alignment=BATCH_COLUMNS)
def _states_kernel(
    qkv, out, matrices, factors, states, kept_updates, kept_keys, kept_decays, rows, query_start, seq_lens, tables,
    qkv_stride, page_stride, table_stride, interval,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_LINE: tl.constexpr, VALUE_LINE: tl.constexpr, KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK columns, value head, sequence)."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    first, start, length = step_of(query_start, seq_lens, sequence)
    if length - start < LEAST:
        return
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    dims, row = tl.arange(0, KEY_BLOCK), tl.arange(0, BORDER)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_dim, is_column = (dims < KEY_DIM)[None, :], (columns < VALUE_DIM)[None, :]
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    page = tl.load(table + tl.maximum(start - 1, 0) // interval).to(tl.int64) * page_stride
    state = _state_before(
        page, states, kept_updates, kept_keys, kept_decays, head, key_head, start, columns,
        KEY_DIM, VALUE_DIM, KEY_LINE, VALUE_LINE, KEY_BLOCK,
    )  # fmt: skip
    tl.debug_barrier()  # no thread stores before all have loaded
    state_at = states + (head * KEY_DIM + dims)[:, None] * VALUE_LINE + columns[None, :]
    update_at = kept_updates + (head * (BORDER - 1) + row)[:, None] * VALUE_LINE + columns[None, :]
    begin = start // BORDER * BORDER
    first_slot = _first_slot(query_start, sequence)
    nothing = tl.zeros((BORDER, BLOCK), tl.float32)
    for border in range(bound(begin), bound(length), BORDER):
        place = border + row
        is_new = ((place >= start) & (place < length))[:, None]
        token = (first + place - start).to(tl.int64)[:, None]
        from_row = qkv + token * qkv_stride
        query = tl.load(from_row + key_head * KEY_DIM + dims[None, :], mask=is_new & is_dim, other=0.0)
        key = tl.load(from_row + (KEY_HEADS + key_head) * KEY_DIM + dims[None, :], mask=is_new & is_dim, other=0.0)
        value_at = from_row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns[None, :]
        value = tl.load(value_at, mask=is_new & is_column, other=0.0).to(tl.float32)
        index = (first_slot + (border - begin) // BORDER).to(tl.int64) * VALUE_HEADS + head
        matrix = matrices + index * (4 * BORDER * BORDER) + row[:, None] * BORDER + row[None, :]
        of_rows = factors + index * (FACTORS * BORDER) + row
        known = _mixed_product(key, state, nothing) * tl.load(of_rows + BORDER)[:, None]
        result = _mixed_product(query, state, nothing) * tl.load(of_rows + 2 * BORDER)[:, None]
        own = value * tl.load(of_rows)[:, None] - known
        updates = _stored_product(matrix, own, nothing, BORDER * BORDER)
        result = _stored_product(matrix + 2 * BORDER * BORDER, updates, result, BORDER * BORDER)
        entering = updates * tl.load(of_rows + 3 * BORDER)[:, None]
        left = tl.load(factors + index * (FACTORS * BORDER) + 4 * BORDER)
        state = _mixed_product(tl.trans(key), entering, state * left)
        out_at = out + token * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + columns[None, :]
        tl.store(out_at, narrow(result, out.dtype.element_ty), mask=is_new & is_column)
        reached = tl.minimum(border + BORDER, length)
        if (reached % interval == 0) | (reached == length):
            to = tl.load(table + (reached - 1) // interval).to(tl.int64) * page_stride
            tl.store(state_at + to, state, mask=(dims < KEY_DIM)[:, None] & is_column)
            is_kept = is_new & (border + BORDER > length)
            tl.store(update_at + to, updates, mask=is_kept & is_column)


def prompt_rule(
    rule: DeltaRule,
    tensors: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
    states: DeviceStateStep,
    tiles: PromptTiles = TILES,
) -> None:
    """Compute prompts. tensors: qkv, gates, out, decays. parts: `rule_parts`."""
    qkv, gates, out, decays = tensors
    batch, table = states.batch, states.tables[rule.layer]
    heads = rule.num_value_heads
    slots = batch.num_tokens // STATE_BORDER + 2 * batch.num_seqs
    size = slots, heads, 2, 2, STATE_BORDER, STATE_BORDER
    matrices = torch.empty(size, dtype=torch.bfloat16, device=qkv.device)
    factors = torch.empty(slots, heads, FACTORS.value, STATE_BORDER, dtype=torch.float32, device=qkv.device)
    constants: dict[str, Any] = {
        "KEY_HEADS": rule.num_key_heads,
        "VALUE_HEADS": heads,
        "KEY_DIM": rule.key_dim,
        "KEY_BLOCK": max(SMALLEST_TILE, next_power_of_2(rule.key_dim)),
        "LEAST": LEAST_TOKENS,
    }
    launch(
        _chunk_kernel,
        (slots, heads),
        qkv,
        gates,
        decays,
        matrices,
        factors,
        batch.query_start,
        batch.seq_lens,
        batch.num_seqs,
        qkv.stride(0),
        gates.stride(0),
        rule.key_dim**-0.5,
        EPSILON=NORM_EPSILON,
        num_warps=tiles.chunk_warps,
        num_stages=1,
        **({"maxnreg": tiles.chunk_registers} if tiles.chunk_registers else {}),
        **constants,
    )
    block = max(SMALLEST_TILE, min(tiles.columns, next_power_of_2(rule.value_dim)))
    launch(
        _states_kernel,
        (blocks_of(rule.value_dim, block), heads, batch.num_seqs),
        qkv,
        out,
        matrices,
        factors,
        *parts,
        batch.rows,
        batch.query_start,
        batch.seq_lens,
        table,
        qkv.stride(0),
        states.floats(rule.layer).stride(0),
        table.stride(0),
        states.interval,
        VALUE_DIM=rule.value_dim,
        KEY_LINE=rule.keys.shape[-1],
        VALUE_LINE=rule.state.shape[-1],
        BLOCK=block,
        num_warps=tiles.state_warps,
        num_stages=tiles.num_stages,
        **constants,
    )
