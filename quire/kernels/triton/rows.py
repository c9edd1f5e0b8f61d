"""Kernels over the rows of live sequences: writes, copies and reads. All rows are in one arena
(quire/worker/platform/state_arena.py): one launch serves all tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import blocks_of, launch

WORDS = 1024
"""32-bit words that one program writes or copies."""
TOKENS = 256
"""Tokens, and sequences, that a program prepares."""


@triton.jit(do_not_specialize=["num_writes"])
def _write_kernel(arena, destinations, values, num_writes, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_writes
    destination = tl.load(destinations + index, mask=mask, other=0)
    tl.store(arena + destination, tl.load(values + index, mask=mask, other=0), mask=mask)


def write_words(arena: torch.Tensor, destinations: torch.Tensor, values: torch.Tensor) -> None:
    """arena[destinations[i]] = values[i]. All int32: [words], [N], [N]; destinations are distinct."""
    num_writes = len(destinations)
    grid = (blocks_of(num_writes, WORDS),)
    launch(_write_kernel, grid, arena, destinations, values, num_writes, BLOCK=WORDS)


@triton.jit
def _copy_kernel(arena, copies, BLOCK: tl.constexpr):
    copy = copies + 3 * tl.program_id(0)
    source, destination, length = tl.load(copy), tl.load(copy + 1), tl.load(copy + 2)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < length
    words = tl.load(arena + source + index, mask=mask, other=0)
    tl.store(arena + destination + index, words, mask=mask)


def copy_words(arena: torch.Tensor, copies: torch.Tensor, longest: int) -> None:
    """Copy words inside the arena: for each of `copies` ([N, 3] int32) source, destination, count <= `longest`. Copies
    must not overlap. arena: [words] int32."""
    launch(_copy_kernel, (len(copies), blocks_of(longest, WORDS)), arena, copies, BLOCK=WORDS)


@triton.jit(
    do_not_specialize=[
        "num_seqs", "num_tokens", "padded_seqs", "padded_tokens", "token_width", "token_shift", "values_start",
        "slot_stride",
    ]
)  # fmt: skip
def _prepare_kernel(
    arena, rows, starts, query_start, token_ids, slot_positions, slots, others, out_rows, out_query_start,
    out_seq_lens, num_seqs, num_tokens, padded_seqs, padded_tokens, token_width, token_shift, tables, values_start,
    rules, slot_stride,
    NUM_GROUPS: tl.constexpr, NUM_OTHERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SEARCH_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    # Per sequence: copy the columns, then write padding.
    is_seq = index < num_seqs
    end = tl.load(query_start + index + 1, mask=is_seq, other=0)
    count = end - tl.load(query_start + index, mask=is_seq, other=0)
    seq_len = tl.load(starts + index, mask=is_seq, other=0) + count
    in_batch = index < padded_seqs
    tl.store(out_rows + index, tl.load(rows + index, mask=is_seq, other=0), mask=in_batch)
    tl.store(out_seq_lens + index, seq_len, mask=in_batch)
    tl.store(out_query_start + index + 1, tl.where(is_seq, end, num_tokens), mask=in_batch)
    tl.store(out_query_start + index, tl.zeros_like(index), mask=index == 0)

    # Per token: its sequence is the last one that begins at or before it.
    is_token = index < num_tokens
    low = tl.zeros_like(index)
    high = low + num_seqs
    for _ in range(SEARCH_STEPS):
        middle = (low + high) // 2
        begins = tl.load(query_start + middle, mask=is_token, other=0) <= index
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    first = tl.load(query_start + low, mask=is_token, other=0)
    position = tl.load(starts + low, mask=is_token, other=0) + index - first
    row = tl.load(rows + low, mask=is_token, other=0).to(tl.int64)
    token_id = tl.load(arena + row * token_width + position + token_shift, mask=is_token, other=0)
    in_batch = index < padded_tokens
    tl.store(token_ids + index, token_id.to(tl.int64), mask=in_batch)
    tl.store(slot_positions + index, tl.where(is_token, position, 0).to(tl.int64), mask=in_batch)
    for group in tl.static_range(NUM_GROUPS):
        table = arena + tl.load(tables + 2 * group) + row * tl.load(tables + 2 * group + 1)
        block = tl.load(table + position // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        slot = tl.where(is_token, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slots + index, slot, mask=in_batch)
        slots += slot_stride
    for number in tl.static_range(NUM_OTHERS):  # by the rules of quire/worker/columns.py
        value = tl.load(arena + values_start + row * NUM_OTHERS + number, mask=is_token, other=0)
        rule = tl.load(rules + number)
        reached = ((value > 0) & (position >= value)).to(tl.int32)
        value = tl.where(rule == 0, value, tl.where(rule == 1, position + value, reached))
        tl.store(others + index, tl.where(is_token, value, 0).to(tl.int64), mask=in_batch)
        others += slot_stride


@dataclass(frozen=True, slots=True)
class RowTables:
    """Places of tables in the arena, in words: token table first, then block tables. token_width: per row of the token
    table. blocks: [groups, 2] int32 on the device, start and row words of each table of tokens. values: first word of
    the step-column values, [num_rows, columns]. rules: [columns] int32 on the device (quire/worker/columns.py).
    token_shift: 1 for inputs that are each position's next token, else 0."""

    token_width: int
    blocks: torch.Tensor
    values: int
    rules: torch.Tensor
    token_shift: int = 0


@dataclass(frozen=True, slots=True)
class StepColumns:
    """Host columns of S sequences with T tokens, int32, on the device. rows, starts: [S], row and first computed
    position. query_start: [S + 1]. listed, values: [L], [columns, L], tokens with listed step-column values, and these
    (None: none)."""

    rows: torch.Tensor
    starts: torch.Tensor
    query_start: torch.Tensor
    listed: torch.Tensor | None = None
    values: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class InputBuffers:
    """Inputs of any step; see DeviceBatch. int64: token_ids, slot_positions, [T]; slots, [groups of
    tokens, T]; others, [columns, T], the model's further columns. int32: rows, seq_lens, [S]; query_start, [S + 1]."""

    token_ids: torch.Tensor
    slot_positions: torch.Tensor
    slots: torch.Tensor
    others: torch.Tensor
    rows: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor


def prepare_inputs(
    arena: torch.Tensor,
    tables: RowTables,
    columns: StepColumns,
    inputs: InputBuffers,
    num_tokens: int,
    padded: tuple[int, int],
    block_size: int,
) -> None:
    """Gather a step's inputs. arena: [words] int32. num_tokens: T. padded: sequences and tokens with padding."""
    num_seqs, (padded_seqs, padded_tokens) = len(columns.rows), padded
    assert num_seqs <= padded_seqs <= len(inputs.rows), "more sequences than there is room for"
    assert num_tokens <= padded_tokens <= len(inputs.token_ids), "more tokens than there is room for"
    launch(
        _prepare_kernel,
        (blocks_of(max(padded_seqs, padded_tokens), TOKENS),),
        arena,
        columns.rows,
        columns.starts,
        columns.query_start,
        inputs.token_ids,
        inputs.slot_positions,
        inputs.slots,
        inputs.others,
        inputs.rows,
        inputs.query_start,
        inputs.seq_lens,
        num_seqs,
        num_tokens,
        padded_seqs,
        padded_tokens,
        tables.token_width,
        tables.token_shift,
        tables.blocks,
        tables.values,
        tables.rules,
        len(inputs.token_ids),
        NUM_GROUPS=len(inputs.slots),
        NUM_OTHERS=len(inputs.others),
        BLOCK_SIZE=block_size,
        # The same for all batches: halvings for the longest list of sequences.
        SEARCH_STEPS=len(inputs.rows).bit_length(),
        BLOCK=TOKENS,
    )
