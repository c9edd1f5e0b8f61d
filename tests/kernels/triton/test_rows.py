"""Writes to rows, copies between them, and the inputs of a step against loops over tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.triton.rows import (
    WORDS,
    InputBuffers,
    RowTables,
    StepColumns,
    copy_words,
    prepare_inputs,
    write_words,
)


def words(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("count", [1, WORDS, WORDS + 7])
def test_writes_go_where_they_should_and_nowhere_else(count: int, device: torch.device) -> None:
    rng = np.random.default_rng(count)
    places = rng.permutation(3 * WORDS)[:count]
    values = rng.integers(-(2**31), 2**31 - 1, count)
    arena = torch.full((3 * WORDS,), 5, dtype=torch.int32, device=device)
    expected = arena.cpu().numpy().copy()
    expected[places] = values
    write_words(arena, words(places, device), words(values, device))
    assert arena.cpu().numpy().tolist() == expected.tolist()


def test_copies_of_different_lengths(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    length = 8 * WORDS
    before = rng.integers(0, 2**31 - 1, length)
    arena = words(before, device)
    copies = [(0, 5 * WORDS, 1), (3, 6 * WORDS, WORDS + 100), (100, 4 * WORDS + 3, WORDS), (0, 7 * WORDS + 200, 0)]
    expected = before.copy()
    for source, destination, count in copies:
        expected[destination : destination + count] = before[source : source + count]
    copy_words(arena, words(copies, device), WORDS + 100)
    assert arena.cpu().numpy().tolist() == expected.tolist()


NUM_ROWS, TOKEN_WIDTH, BLOCK_WIDTH, NUM_GROUPS, BLOCK_SIZE = 9, 44, 12, 2, 4
GROUP_WORDS = NUM_ROWS * BLOCK_WIDTH
BLOCKS = NUM_ROWS * TOKEN_WIDTH
VALUES, RULES = BLOCKS + NUM_GROUPS * GROUP_WORDS, (2, 0, 1, 2)
CAPACITY = (16, 300)
"""More tokens than one program prepares."""


def tables(device: torch.device) -> RowTables:
    """Of groups one behind the other."""
    places = [(BLOCKS + group * GROUP_WORDS, BLOCK_WIDTH) for group in range(NUM_GROUPS)]
    return RowTables(TOKEN_WIDTH, torch.tensor(places, dtype=torch.int32, device=device), VALUES, words(RULES, device))


def buffers(device: torch.device) -> InputBuffers:
    """Filled with something that no step leaves."""
    max_seqs, max_tokens = CAPACITY
    wide = {"dtype": torch.int64, "device": device}
    narrow = {"dtype": torch.int32, "device": device}
    return InputBuffers(
        token_ids=torch.full((max_tokens,), -7, **wide),
        slot_positions=torch.full((max_tokens,), -7, **wide),
        slots=torch.full((NUM_GROUPS, max_tokens), -7, **wide),
        others=torch.full((len(RULES), max_tokens), -7, **wide),
        rows=torch.full((max_seqs,), -7, **narrow),
        query_start=torch.full((max_seqs + 1,), -7, **narrow),
        seq_lens=torch.full((max_seqs,), -7, **narrow),
    )


@pytest.mark.parametrize(
    ("counts", "padded"),
    [
        ([1], (1, 1)),
        ([1, 1, 1, 1, 1], (8, 8)),
        ([1] * 9, (9, 9)),
        ([40, 1, 17, 3, 1], (5, 64)),
        ([41, 41, 41, 41, 41, 41, 30], (7, 276)),
        ([], (4, 6)),
    ],
    ids=str,
)
def test_inputs_against_a_loop(counts: list[int], padded: tuple[int, int], device: torch.device) -> None:
    rng = np.random.default_rng(len(counts))
    arena = rng.integers(0, 1000, VALUES + NUM_ROWS * len(RULES))
    arena[VALUES:] = rng.integers(0, 30, NUM_ROWS * len(RULES))
    tokens = arena[:BLOCKS].reshape(NUM_ROWS, TOKEN_WIDTH)
    blocks = arena[BLOCKS:VALUES].reshape(NUM_GROUPS, NUM_ROWS, BLOCK_WIDTH)
    rows = rng.permutation(NUM_ROWS)[: len(counts)]
    starts = np.array([rng.integers(0, 42 - count) for count in counts], np.int64)
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    columns = StepColumns(words(rows, device), words(starts, device), words(query_start, device))
    inputs = buffers(device)
    prepare_inputs(words(arena, device), tables(device), columns, inputs, sum(counts), padded, BLOCK_SIZE)

    places = [(row, start + i) for row, start, n in zip(rows, starts, counts, strict=True) for i in range(n)]
    (num_seqs, num_tokens), (spare_seqs, spare_tokens) = padded, (padded[0] - len(counts), padded[1] - len(places))

    def expect(found: torch.Tensor, values: list[int], padding: int, spare: int) -> None:
        untouched = [-7] * (len(found) - len(values) - spare)
        assert found.tolist() == [*map(int, values), *[padding] * spare, *untouched]

    expect(inputs.token_ids, [tokens[place] for place in places], 0, spare_tokens)
    expect(inputs.slot_positions, [position for _, position in places], 0, spare_tokens)
    for number, rule in enumerate(RULES):
        values = [(arena[VALUES + row * len(RULES) + number], at) for row, at in places]
        by_rule = [(value, at + value, int(0 < value <= at))[rule] for value, at in values]
        expect(inputs.others[number], by_rule, 0, spare_tokens)
    for group in range(NUM_GROUPS):
        slots = [blocks[group, row, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for row, at in places]
        expect(inputs.slots[group], slots, -1, spare_tokens)
    expect(inputs.rows, rows.tolist(), 0, spare_seqs)
    expect(inputs.seq_lens, (starts + np.array(counts, np.int64)).tolist(), 0, spare_seqs)
    expect(inputs.query_start, query_start.tolist(), sum(counts), spare_seqs)
    assert num_tokens >= len(places)
    assert num_seqs >= len(counts)


def test_a_batch_larger_than_its_padding_is_a_bug_that_shows(device: torch.device) -> None:
    arena = torch.zeros(BLOCKS + NUM_GROUPS * GROUP_WORDS, dtype=torch.int32, device=device)
    columns = StepColumns(words([0, 1], device), words([0, 0], device), words([0, 3, 4], device))
    for padded in ((1, 4), (2, 3), (17, 4), (2, 301)):
        with pytest.raises(AssertionError, match="room"):
            prepare_inputs(arena, tables(device), columns, buffers(device), 4, padded, BLOCK_SIZE)
