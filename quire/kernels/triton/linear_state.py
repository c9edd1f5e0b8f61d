"""Layers with recurrent state on a device: short convolution, gated delta rule and gated norm, as `layers/states.py`
defines them. Bits depend only on the sequence; without `batch_invariant`, `delta_decode.py` decodes and
`delta_prompt.py` computes prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from quire.attention.device_batch import DeviceStateStep
from quire.kernels.arguments import NORM_EPSILON, TILE, ConvolutionWeights, DeltaRule, GatedNormWeights, StatePart
from quire.kernels.triton.activation import KINDS, SILU, activate
from quire.kernels.triton.delta_common import BORDER, SMALLEST_TILE, product, step_of
from quire.kernels.triton.delta_decode import decode_rule_kernel
from quire.kernels.triton.delta_prompt import LEAST_TOKENS, prompt_rule
from quire.kernels.triton.paged_attention import BATCH_COLUMNS, sequence_of_token
from quire.kernels.triton.runtime import blocks_of, bound, has_hopper_memory, launch, narrow, next_power_of_2

CHANNELS = 1024
"""Channels per program of the convolution."""
NORM_ELEMENTS = 2048
"""Elements per program of the gated norm."""
COLUMNS = 32
"""Columns of a state per program, at most."""
MAX_TOKENS = 2**31 - 1
NO_ACTIVATION = tl.constexpr(-1)
ROWS = tl.constexpr(TILE)


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=BATCH_COLUMNS)
def _convolution_kernel(
    x,
    out,
    pages,
    rows,
    query_start,
    seq_lens,
    tables,
    kernel,
    bias,
    num_seqs,
    channels,
    x_stride,
    page_stride,
    table_stride,
    INTERVAL: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    LINE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes `out`. Program (token, BLOCK channels). pages: at the layer's inputs."""
    token = tl.program_id(0)
    if token >= tl.load(query_start + num_seqs):
        return
    sequence = sequence_of_token(query_start, token, num_seqs)
    first, start, _ = step_of(query_start, seq_lens, sequence)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < channels
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    block = tl.load(table + tl.maximum(start - 1, 0) // INTERVAL).to(tl.int64)
    kept = pages + block * page_stride + columns
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(WIDTH):
        source = token - (WIDTH - 1 - tap)
        in_step = source >= first
        value = tl.load(x + source.to(tl.int64) * x_stride + columns, mask=inside & in_step, other=0.0).to(tl.float32)
        position = start + source - first
        is_kept = (source < first) & (position >= 0)
        value += tl.load(kept + tl.maximum(position, 0) % NUM_KEPT * LINE, mask=inside & is_kept, other=0.0)
        total = tl.fma(value, tl.load(kernel + tap * channels + columns, mask=inside, other=0.0), total)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0)
    if KIND != NO_ACTIVATION:
        total = activate(total, KIND)
    to = out + token.to(tl.int64) * channels + columns
    tl.store(to, narrow(total, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=BATCH_COLUMNS)
def _keep_inputs_kernel(
    x,
    pages,
    rows,
    query_start,
    seq_lens,
    tables,
    channels,
    x_stride,
    page_stride,
    table_stride,
    INTERVAL: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    LINE: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (sequence, BLOCK channels): writes the last inputs of every block of the step."""
    sequence = tl.program_id(0)
    first, start, length = step_of(query_start, seq_lens, sequence)
    if length == start:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, KEPT)
    inside = (row < NUM_KEPT)[:, None] & (columns < channels)[None, :]
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    read = pages + tl.load(table + tl.maximum(start - 1, 0) // INTERVAL).to(tl.int64) * page_stride
    last = (length - 1) // INTERVAL
    for number in range(bound(last - start // INTERVAL + 1)):
        block = last - number
        position = tl.minimum(length, (block + 1) * INTERVAL) - NUM_KEPT + row
        in_step = (position >= start)[:, None]
        at = x + (first + position - start).to(tl.int64)[:, None] * x_stride + columns[None, :]
        values = tl.load(at, mask=inside & in_step, other=0.0).to(tl.float32)
        place = (tl.maximum(position, 0) % NUM_KEPT)[:, None] * LINE + columns[None, :]
        is_position = inside & (position >= 0)[:, None]
        values += tl.load(read + place, mask=is_position & (position < start)[:, None], other=0.0)
        tl.debug_barrier()  # no thread stores before all have loaded
        to = pages + tl.load(table + block).to(tl.int64) * page_stride
        tl.store(to + place, values, mask=is_position)


def short_convolution(weights: ConvolutionWeights, x: torch.Tensor, out: torch.Tensor, states: DeviceStateStep) -> None:
    """Causal convolution of each channel (`Operations.short_convolution`). x: rows of contiguous elements. out: [T,
    channels], contiguous; padding rows are not written."""
    width, channels = weights.kernel.shape
    assert x.stride(1) == 1, "the elements of a row lie side by side"
    batch, pages, table = states.batch, states.floats(weights.layer), states.tables[weights.layer]
    columns = batch.rows, batch.query_start, batch.seq_lens, table
    block = min(CHANNELS, next_power_of_2(channels))
    sizes = {"INTERVAL": states.interval, "NUM_KEPT": weights.num_kept, "LINE": weights.inputs.shape[1], "BLOCK": block}
    at = _part(pages, weights.inputs)
    strides = x.stride(0), pages.stride(0), table.stride(0)
    launch(
        _convolution_kernel,
        (batch.num_tokens, blocks_of(channels, block)),
        x,
        out,
        at,
        *columns,
        weights.kernel,
        weights.bias,
        batch.num_seqs,
        channels,
        *strides,
        HAS_BIAS=weights.bias is not None,
        KIND=NO_ACTIVATION.value if weights.activation is None else KINDS[weights.activation],
        WIDTH=width,
        num_warps=4,
        **sizes,
    )
    launch(
        _keep_inputs_kernel,
        (batch.num_seqs, blocks_of(channels, block)),
        x,
        at,
        *columns,
        channels,
        *strides,
        KEPT=next_power_of_2(weights.num_kept),
        num_warps=4,
        **sizes,
    )


@triton.jit
def _unit(heads, EPSILON: tl.constexpr):
    return heads * tl.rsqrt(tl.sum(heads * heads, 1) + EPSILON)[:, None]


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), also where the sum rounds to 1."""
    small = tl.exp(-tl.abs(x))
    above = small + 1.0
    exact = tl.where(above == 1.0, small, tl.log(above) * (small / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.maximum(x, 0.0) + exact


@triton.jit(do_not_specialize=["num_tokens"])
def _prepare_kernel(
    qkv,
    gates,
    keys,
    decays,
    rate,
    time_bias,
    num_tokens,
    qkv_stride,
    gates_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """Normalises keys, computes decays. Program (ROWS tokens, key head; the last: decays of all value heads). keys: [T,
    KEY_HEADS, KEY_DIM], decays: [T, VALUE_HEADS] float32."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    head = tl.program_id(1)
    if head < KEY_HEADS:
        dims = tl.arange(0, KEY_BLOCK)[None, :]
        inside = (token < num_tokens) & (dims < KEY_DIM)
        at = qkv + token * qkv_stride + (KEY_HEADS + head) * KEY_DIM + dims
        key = _unit(tl.load(at, mask=inside, other=0.0).to(tl.float32), EPSILON)
        tl.store(keys + (token * KEY_HEADS + head) * KEY_DIM + dims, key, mask=inside)
    else:
        heads = tl.arange(0, HEADS_BLOCK)[None, :]
        present = (token < num_tokens) & (heads < VALUE_HEADS)
        gate = tl.load(gates + token * gates_stride + VALUE_HEADS + heads, mask=present, other=0.0).to(tl.float32)
        bias = tl.load(time_bias + heads, mask=heads < VALUE_HEADS, other=0.0)
        rates = tl.load(rate + heads, mask=heads < VALUE_HEADS, other=0.0)
        tl.store(decays + token * VALUE_HEADS + heads, -rates * _softplus(gate + bias), mask=present)


@triton.jit
def _key_rows(
    kept, new, first, start, length, border, row, key_head,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_LINE: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys of rows after a border, [rows, KEY_BLOCK], from the read page or the step; zeros for later tokens."""
    place, dims = border + row, tl.arange(0, KEY_BLOCK)[None, :]
    is_old = (place < start)[:, None] & (dims < KEY_DIM)
    is_new = ((place >= start) & (place < length))[:, None] & (dims < KEY_DIM)
    key = tl.load(kept + (key_head * (BORDER - 1) + row)[:, None] * KEY_LINE + dims, mask=is_old, other=0.0)
    token = (first + place - start).to(tl.int64)[:, None]
    return key + tl.load(new + (token * KEY_HEADS + key_head) * KEY_DIM + dims, mask=is_new, other=0.0)


@triton.jit
def _tile_results(
    query, own_key, key, value, beta, old, is_own_new, state, updates, is_new, decay, sums, tile, count
):  # fmt: skip
    """Updates of a chunk's ROWS tokens from row `tile` on, and their results. old: known updates. is_own_new: [ROWS,
    1], is_new: [BORDER], tokens with unknown ones. sums: running sums of `decay`. count: rows of the chunk.
    """
    row, own_row = tl.arange(0, BORDER), tl.arange(0, ROWS)
    own = tile + own_row
    beta = 1.0 / (tl.exp(-beta) + 1.0)
    own_sums = tl.sum(tl.where(row[None, :] <= own[:, None], decay[None, :], 0.0), 1)
    left = tl.exp(own_sums)[:, None]
    fading = tl.exp(tl.minimum(own_sums[:, None] - sums[None, :], 0.0))
    nothing = tl.zeros((ROWS, BORDER), tl.float32)
    to_key = product(own_key, tl.trans(key), nothing) * fading
    to_query = product(query, tl.trans(key), nothing) * fading
    no_values = tl.zeros(value.shape, tl.float32)
    right = value - left * product(own_key, state, no_values)
    right -= product(tl.where(row[None, :] < tile, to_key, 0.0), updates, no_values)
    inner = product(own_key, tl.trans(own_key), tl.zeros((ROWS, ROWS), tl.float32))
    inner = inner * tl.exp(tl.minimum(own_sums[:, None] - own_sums[None, :], 0.0))
    inner = tl.where(own_row[None, :] < own_row[:, None], inner, 0.0)
    computed = no_values
    for number in range(bound(tl.minimum(count - tile, ROWS))):
        # A row's update is known after the earlier rows' updates are subtracted.
        is_row = (own_row == number)[:, None]
        update = tl.sum(tl.where(is_row, tl.where(is_own_new, right * beta, old), 0.0), 0)
        computed = tl.where(is_row & is_own_new, update[None, :], computed)
        share = tl.sum(tl.where(own_row[None, :] == number, inner, 0.0), 1)
        shares = tl.broadcast_to(-share[:, None], right.shape)
        right = tl.fma(shares, tl.broadcast_to(update[None, :], right.shape), right)
    placed = tl.broadcast_to(computed[None, :, :], (BORDER // ROWS, ROWS, computed.shape[1]))
    is_placed = (row // ROWS * ROWS == tile) & is_new
    updates = tl.where(is_placed[:, None], tl.reshape(placed, updates.shape), updates)
    seen = tl.where(row[None, :] <= own[:, None], to_query, 0.0)
    return updates, product(seen, updates, left * product(query, state, no_values))


@triton.jit(do_not_specialize_on_alignment=BATCH_COLUMNS)
def _rule_kernel(
    qkv, gates, out, new_keys, new_decays, states, kept_updates, kept_keys, kept_decays, rows, query_start, seq_lens,
    tables, qkv_stride, gates_stride, page_stride, table_stride, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_LINE: tl.constexpr, VALUE_LINE: tl.constexpr, KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    INTERVAL: tl.constexpr, EPSILON: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK columns, value head, sequence). states, kept_updates, kept_keys, kept_decays: `rule_parts`. LEAST,
    MOST: sequences with fewer or more new tokens are left out."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    first, start, length = step_of(query_start, seq_lens, sequence)
    if (length - start < LEAST) | (length - start > MOST):
        return
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    dims = tl.arange(0, KEY_BLOCK)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, BORDER)
    is_column = (columns < VALUE_DIM)[None, :]
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    page = tl.load(table + tl.maximum(start - 1, 0) // INTERVAL).to(tl.int64) * page_stride
    state_at = (head * KEY_DIM + dims)[:, None] * VALUE_LINE + columns[None, :]
    is_state = (dims < KEY_DIM)[:, None] & is_column
    update_at = (head * (BORDER - 1) + row)[:, None] * VALUE_LINE + columns[None, :]
    state = tl.load(states + page + state_at, mask=is_state & (start > 0), other=0.0)
    for border in range(bound(start // BORDER * BORDER), bound(length), BORDER):
        place = border + row
        is_old, is_new = place < start, (place >= start) & (place < length)
        token = (first + place - start).to(tl.int64)
        decay = tl.load(kept_decays + page + head * BORDER + row, mask=is_old, other=0.0)
        decay += tl.load(new_decays + token * VALUE_HEADS + head, mask=is_new, other=0.0)
        sums = tl.sum(tl.where(row[None, :] <= row[:, None], decay[None, :], 0.0), 1)
        updates = tl.load(kept_updates + page + update_at, mask=is_old[:, None] & is_column, other=0.0)
        count = tl.minimum(length - border, BORDER)
        for tile in range(bound(tl.maximum(start - border, 0) // ROWS * ROWS), bound(count), ROWS):
            own = tile + tl.arange(0, ROWS)
            own_place = border + own
            own_new = ((own_place >= start) & (own_place < length))[:, None]
            own_token = (first + own_place - start).to(tl.int64)[:, None]
            from_row = qkv + own_token * qkv_stride
            query_at = from_row + key_head * KEY_DIM + dims[None, :]
            query = tl.load(query_at, mask=own_new & (dims < KEY_DIM)[None, :], other=0.0)
            query = _unit(query.to(tl.float32), EPSILON) * scale
            value_at = from_row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns[None, :]
            value = tl.load(value_at, mask=own_new & is_column, other=0.0).to(tl.float32)
            beta = tl.load(gates + own_token * gates_stride + head, mask=own_new, other=0.0).to(tl.float32)
            old_at = (head * (BORDER - 1) + own)[:, None] * VALUE_LINE + columns[None, :]
            old = tl.load(kept_updates + page + old_at, mask=(own_place < start)[:, None] & is_column, other=0.0)
            own_key = _key_rows(
                kept_keys + page, new_keys, first, start, length, border, own, key_head,
                KEY_HEADS, KEY_DIM, KEY_LINE, KEY_BLOCK,
            )  # fmt: skip
            # Read the keys again for every tile: kept over the loop, they would take all shared memory.
            key = _key_rows(
                kept_keys + page, new_keys, first, start, length, border, row, key_head,
                KEY_HEADS, KEY_DIM, KEY_LINE, KEY_BLOCK,
            )  # fmt: skip
            updates, result = _tile_results(
                query, own_key, key, value, beta, old, own_new, state, updates, is_new, decay, sums, tile, count
            )
            out_at = out + own_token * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + columns[None, :]
            tl.store(out_at, narrow(result, out.dtype.element_ty), mask=own_new & is_column)
        reached = border + BORDER
        if reached <= length:
            key = _key_rows(
                kept_keys + page, new_keys, first, start, length, border, row, key_head,
                KEY_HEADS, KEY_DIM, KEY_LINE, KEY_BLOCK,
            )  # fmt: skip
            whole = tl.sum(decay, 0)
            gone = tl.exp(tl.minimum(whole - sums, 0.0))
            state = tl.trans(product(tl.trans(updates), key * gone[:, None], tl.trans(state * tl.exp(whole))))
            tl.debug_barrier()  # no thread stores before all have loaded
            if reached % INTERVAL == 0 or reached == length:
                to = tl.load(table + (reached - 1) // INTERVAL).to(tl.int64) * page_stride
                tl.store(states + to + state_at, state, mask=is_state)
        else:
            tl.debug_barrier()
            to = tl.load(table + (length - 1) // INTERVAL).to(tl.int64) * page_stride
            if border > start or start % INTERVAL == 0:  # otherwise the page already has this state
                tl.store(states + to + state_at, state, mask=is_state)
            tl.store(kept_updates + to + update_at, updates, mask=is_new[:, None] & is_column)


@triton.jit(do_not_specialize_on_alignment=BATCH_COLUMNS)
def _keep_rows_kernel(
    new_keys,
    new_decays,
    kept_keys,
    kept_decays,
    rows,
    query_start,
    seq_lens,
    tables,
    page_stride,
    table_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_LINE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    INTERVAL: tl.constexpr,
):
    """Program (sequence, key head; the last: decays): writes the rows of tokens after the last border."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    first, start, length = step_of(query_start, seq_lens, sequence)
    if start == length or length % BORDER == 0:
        return
    row = tl.arange(0, BORDER)
    place = length // BORDER * BORDER + row
    is_new = ((place >= start) & (place < length))[:, None]
    token = (first + place - start).to(tl.int64)[:, None]
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    page = tl.load(table + (length - 1) // INTERVAL).to(tl.int64) * page_stride
    if head < KEY_HEADS:
        dims = tl.arange(0, KEY_BLOCK)[None, :]
        inside = is_new & (dims < KEY_DIM)
        key = tl.load(new_keys + (token * KEY_HEADS + head) * KEY_DIM + dims, mask=inside, other=0.0)
        tl.store(kept_keys + page + (head * (BORDER - 1) + row)[:, None] * KEY_LINE + dims, key, mask=inside)
    else:
        heads = tl.arange(0, HEADS_BLOCK)[None, :]
        present = is_new & (heads < VALUE_HEADS)
        decay = tl.load(new_decays + token * VALUE_HEADS + heads, mask=present, other=0.0)
        tl.store(kept_decays + page + heads * BORDER + row[:, None], decay, mask=present)


def gated_delta_rule(
    rule: DeltaRule, qkv: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, states: DeviceStateStep
) -> None:
    """Gated delta rule over states (`Operations.gated_delta_rule`). qkv, gates: rows of contiguous elements. out: [T,
    num_value_heads * value_dim], contiguous; padding rows are not written."""
    assert qkv.stride(1) == gates.stride(1) == 1, "the elements of a row lie side by side"
    batch, pages, table = states.batch, states.floats(rule.layer), states.tables[rule.layer]
    columns = batch.rows, batch.query_start, batch.seq_lens, table
    num_tokens, heads = batch.num_tokens, rule.num_value_heads
    keys = torch.empty(num_tokens, rule.num_key_heads, rule.key_dim, dtype=torch.float32, device=qkv.device)
    decays = torch.empty(num_tokens, heads, dtype=torch.float32, device=qkv.device)
    sizes = {"KEY_HEADS": rule.num_key_heads, "VALUE_HEADS": heads, "KEY_DIM": rule.key_dim}
    sizes["KEY_BLOCK"] = max(SMALLEST_TILE, next_power_of_2(rule.key_dim))
    heads_block = next_power_of_2(heads)
    launch(
        _prepare_kernel,
        (blocks_of(num_tokens, TILE), rule.num_key_heads + 1),
        qkv,
        gates,
        keys,
        decays,
        rule.rate,
        rule.time_bias,
        num_tokens,
        qkv.stride(0),
        gates.stride(0),
        HEADS_BLOCK=heads_block,
        EPSILON=NORM_EPSILON,
        num_warps=4,
        **sizes,
    )
    _launch_rule(rule, (qkv, gates, out, keys, decays), states, sizes)
    launch(
        _keep_rows_kernel,
        (batch.num_seqs, rule.num_key_heads + 1),
        keys,
        decays,
        *(_part(pages, part) for part in (rule.keys, rule.decays)),
        *columns,
        pages.stride(0),
        table.stride(0),
        KEY_LINE=rule.keys.shape[-1],
        HEADS_BLOCK=heads_block,
        INTERVAL=states.interval,
        num_warps=4,
        **sizes,
    )


def _launch_rule(
    rule: DeltaRule, tensors: Sequence[torch.Tensor], states: DeviceStateStep, sizes: Mapping[str, int]
) -> None:
    """Launch the rule's kernels."""
    batch, pages, table = states.batch, states.floats(rule.layer), states.tables[rule.layer]
    block = max(SMALLEST_TILE, min(COLUMNS, next_power_of_2(rule.value_dim)))
    grid = blocks_of(rule.value_dim, block), rule.num_value_heads, batch.num_seqs
    parts = rule_parts(rule, states)
    arguments = (
        *tensors,
        *parts,
        batch.rows,
        batch.query_start,
        batch.seq_lens,
        table,
        tensors[0].stride(0),
        tensors[1].stride(0),
        pages.stride(0),
        table.stride(0),
        rule.key_dim**-0.5,
    )
    constants: dict[str, Any] = {
        **sizes,
        "VALUE_DIM": rule.value_dim,
        "KEY_LINE": rule.keys.shape[-1],
        "VALUE_LINE": rule.state.shape[-1],
        "BLOCK": block,
        "INTERVAL": states.interval,
        "EPSILON": NORM_EPSILON,
    }
    qkv = tensors[0]
    in_chunks = not states.batch_invariant and qkv.dtype == torch.bfloat16 and has_hopper_memory(qkv.device)
    if not states.batch_invariant:
        launch(decode_rule_kernel, grid, *arguments, num_warps=4, **constants)
    if states.batch_invariant or batch.max_query_len > 1:
        launch(
            _rule_kernel,
            grid,
            *arguments,
            LEAST=1 if states.batch_invariant else 2,
            MOST=LEAST_TOKENS - 1 if in_chunks else MAX_TOKENS,
            num_warps=8,
            num_stages=1,
            # At its highest level the assembler leaves this kernel 32 registers and spills the rest.
            ptx_options="--opt-level 1",
            **constants,
        )
    if in_chunks and batch.max_query_len >= LEAST_TOKENS:
        _, gates, out, _, decays = tensors
        prompt_rule(rule, (qkv, gates, out, decays), parts, states)


def rule_parts(rule: DeltaRule, states: DeviceStateStep) -> list[torch.Tensor]:
    """Pages at state, updates, keys, decays."""
    pages = states.floats(rule.layer)
    return [_part(pages, part) for part in (rule.state, rule.updates, rule.keys, rule.decays)]


def _part(pages: torch.Tensor, part: StatePart) -> torch.Tensor:
    return pages[:, part.offset // 4 :]


@triton.jit(do_not_specialize=["num_heads"])
def _gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    num_heads,
    epsilon,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (HEADS heads of all tokens)."""
    head = (tl.program_id(0) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    inside = (head < num_heads) & (dims < SIZE)
    at = head * SIZE + dims
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + epsilon)[:, None]
    scaled = wide * scale * tl.load(weight + dims, mask=dims < SIZE, other=0.0).to(tl.float32)
    scaled *= activate(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32), SILU)
    tl.store(out + at, narrow(scaled, out.dtype.element_ty), mask=inside)


def gated_norm(weights: GatedNormWeights, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Norm of delta rule results times a gate (`Operations.gated_norm`). x, gate: contiguous."""
    assert x.is_contiguous(), "heads lie one behind the other"
    assert gate.is_contiguous(), "and so do their gates"
    out, num_heads, block = torch.empty_like(x), x.numel() // weights.size, next_power_of_2(weights.size)
    heads = max(1, NORM_ELEMENTS // block)
    if num_heads:
        launch(
            _gated_norm_kernel,
            (blocks_of(num_heads, heads),),
            x,
            gate,
            weights.weight,
            out,
            num_heads,
            weights.epsilon,
            SIZE=weights.size,
            BLOCK=block,
            HEADS=heads,
            num_warps=4,
        )
    return out
