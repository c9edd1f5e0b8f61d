"""Gated delta rule of one new token a sequence; bits differ from a prompt's."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.delta_common import BORDER
from quire.kernels.triton.paged_attention import BATCH_COLUMNS
from quire.kernels.triton.runtime import bound, narrow


@triton.jit(do_not_specialize_on_alignment=BATCH_COLUMNS)
def decode_rule_kernel(
    qkv, gates, out, new_keys, new_decays, states, kept_updates, kept_keys, kept_decays, rows, query_start, seq_lens,
    tables, qkv_stride, gates_stride, page_stride, table_stride, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_LINE: tl.constexpr, VALUE_LINE: tl.constexpr, KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    INTERVAL: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK columns, value head, sequence of one new token)."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    first, length = tl.load(query_start + sequence), tl.load(seq_lens + sequence)
    if tl.load(query_start + sequence + 1) - first != 1:
        return
    start = length - 1
    count = start % BORDER
    token = first.to(tl.int64)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    dims, row = tl.arange(0, KEY_BLOCK), tl.arange(0, BORDER)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_column, is_dim, is_kept = columns < VALUE_DIM, dims < KEY_DIM, row < count
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    page = tl.load(table + tl.maximum(start - 1, 0) // INTERVAL).to(tl.int64) * page_stride
    state_at = (head * KEY_DIM + dims)[:, None] * VALUE_LINE + columns[None, :]
    is_state = is_dim[:, None] & is_column[None, :]
    key_at = (key_head * (BORDER - 1) + row)[:, None] * KEY_LINE + dims[None, :]
    update_at = (head * (BORDER - 1) + row)[:, None] * VALUE_LINE + columns[None, :]
    state = tl.load(states + page + state_at, mask=is_state & (start > 0), other=0.0)
    updates = tl.load(kept_updates + page + update_at, mask=is_kept[:, None] & is_column[None, :], other=0.0)
    keys = tl.load(kept_keys + page + key_at, mask=is_kept[:, None] & is_dim[None, :], other=0.0)
    decays = tl.load(kept_decays + page + head * BORDER + row, mask=is_kept, other=0.0)
    key = tl.load(new_keys + (token * KEY_HEADS + key_head) * KEY_DIM + dims, mask=is_dim, other=0.0)
    from_row = qkv + token * qkv_stride
    query = tl.load(from_row + key_head * KEY_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
    query = query * tl.rsqrt(tl.sum(query * query, 0) + EPSILON) * scale
    value = tl.load(from_row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns, mask=is_column, other=0.0)
    beta = 1.0 / (tl.exp(-tl.load(gates + token * gates_stride + head).to(tl.float32)) + 1.0)
    whole = tl.sum(decays, 0) + tl.load(new_decays + token * VALUE_HEADS + head)
    left = tl.exp(whole)
    fading = tl.where(is_kept, tl.exp(tl.minimum(whole - tl.cumsum(decays, 0), 0.0)), 0.0)
    to_key = tl.sum(keys * key[None, :], 1) * fading
    to_query = tl.sum(keys * query[None, :], 1) * fading
    known = left * tl.sum(state * key[:, None], 0) + tl.sum(updates * to_key[:, None], 0)
    update = (value.to(tl.float32) - known) * beta
    result = left * tl.sum(state * query[:, None], 0) + tl.sum(updates * to_query[:, None], 0)
    result += tl.sum(key * query, 0) * update
    to_row = out + token * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + columns
    tl.store(to_row, narrow(result, out.dtype.element_ty), mask=is_column)
    to = tl.load(table + start // INTERVAL).to(tl.int64) * page_stride
    tl.debug_barrier()  # no thread stores before all have loaded
    if count == BORDER - 1:
        state = state * left + key[:, None] * update[None, :]
        for number in range(bound(count)):
            at = head * (BORDER - 1) + number
            kept = tl.load(kept_updates + page + at * VALUE_LINE + columns, mask=is_column, other=0.0)
            at = key_head * (BORDER - 1) + number
            own_key = tl.load(kept_keys + page + at * KEY_LINE + dims, mask=is_dim, other=0.0)
            share = tl.sum(tl.where(row == number, fading, 0.0), 0)
            state += (own_key * share)[:, None] * kept[None, :]
        tl.store(states + to + state_at, state, mask=is_state)
    else:
        if start % INTERVAL == 0:  # otherwise the page already has this state
            tl.store(states + to + state_at, state, mask=is_state)
        at = head * (BORDER - 1) + count
        tl.store(kept_updates + to + at * VALUE_LINE + columns, update, mask=is_column)
