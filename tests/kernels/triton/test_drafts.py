"""Kernels of drafts against loops over sequences: what lies around the rows' words stays as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.triton.drafts import (
    NOT_COMPUTED,
    POSITIONS,
    SEQUENCES,
    DraftTables,
    accept_drafts,
    find_drafts,
    place_drafts,
)
from quire.worker.plain_texts import PlainTexts

NUM_ROWS, TOKEN_WIDTH = SEQUENCES + 9, 60
NUM_TOKENS = NUM_ROWS * TOKEN_WIDTH
SPARE = 5
"""Words between the tables and behind them."""


def tables(max_drafts: int, token_width: int = TOKEN_WIDTH, num_rows: int = NUM_ROWS) -> DraftTables:
    computed = num_rows * token_width + SPARE
    return DraftTables(token_width, computed, computed + num_rows + SPARE, max_drafts)


def random_arena(rng: np.random.Generator, places: DraftTables, num_rows: int = NUM_ROWS) -> np.ndarray:
    return rng.integers(0, 5, places.found + num_rows * places.max_drafts + SPARE).astype(np.int32)


def words(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(np.array(values), dtype=torch.int32, device=device)


@pytest.mark.parametrize("num_seqs", [1, SEQUENCES + 3])
@pytest.mark.parametrize("max_drafts", [1, 3, 7])
def test_placing_against_a_loop(num_seqs: int, max_drafts: int, device: torch.device) -> None:
    """Some sequences have the host's proposals, drafts from their start or from the place that the sequence has
    reached, and some the found ones; some start earlier than planned, and some rows have no count of their own."""
    most_ahead = 2
    rng, places = np.random.default_rng(num_seqs), tables(max_drafts)
    before = random_arena(rng, places)
    rows = rng.permutation(NUM_ROWS)[:num_seqs]
    planned, num_drafts = rng.integers(8, 30, num_seqs), rng.integers(0, max_drafts + 1, num_seqs)
    counts = num_drafts + rng.integers(1, 20, num_seqs)
    early = rng.integers(0, 8, num_seqs)
    before[places.computed : places.computed + NUM_ROWS] = NOT_COMPUTED
    before[places.computed + rows] = np.where(early < 5, planned - early, NOT_COMPUTED - early)
    known = np.minimum(planned, before[places.computed + rows]) + counts - num_drafts
    given, given_at, given_from = [0], np.full(num_seqs, -1), np.full(num_seqs, NOT_COMPUTED)
    for index in np.flatnonzero(rng.random(num_seqs) < 0.7):
        given_at[index] = len(given)
        given_from[index] = rng.choice([NOT_COMPUTED, *(known[index] - each for each in (-1, 0, 1, 2, 9))])
        given += rng.integers(10, 20, num_drafts[index] + most_ahead).tolist()
    query_start = np.concatenate(([0], np.cumsum(counts)))

    expected, starts, shifts = before.copy(), planned.copy(), np.zeros(num_seqs, int)
    for index, row in enumerate(rows):
        starts[index] = min(planned[index], before[places.computed + row])
        shifts[index] = planned[index] - starts[index]
        end = row * TOKEN_WIDTH + starts[index] + counts[index]
        found = before[places.found + row * max_drafts :][: num_drafts[index]]
        if given_at[index] >= 0:
            first = given_at[index] + min(max(known[index] - given_from[index], 0), most_ahead)
            found = given[first : first + num_drafts[index]]
        expected[end - num_drafts[index] : end] = found

    arena, found_starts = words(before, device), words(planned, device)
    found_shifts = words(np.full(num_seqs, -9), device)
    columns = words(rows, device), found_starts, words(query_start, device)
    drafts = [words(column, device) for column in (num_drafts, given_at, given_from, given)]
    place_drafts(arena, places, columns, drafts, found_shifts, most_ahead)
    assert found_starts.tolist() == starts.tolist()
    assert found_shifts.tolist() == shifts.tolist()
    assert arena.tolist() == expected.tolist()


@pytest.mark.parametrize("num_samples", [1, SEQUENCES + 3])
@pytest.mark.parametrize("max_drafts", [1, 3, 7])
def test_accepting_against_a_loop(num_samples: int, max_drafts: int, device: torch.device) -> None:
    """Tokens of two kinds, so that drafts are right by chance, and rows that are not sound, before wrong drafts and
    behind them. Samples have one row to max_drafts + 1."""
    rng, places = np.random.default_rng(num_samples), tables(max_drafts)
    before = random_arena(rng, places)
    num_rows_of = rng.integers(1, max_drafts + 2, num_samples)
    num_rows_of[-1] = max_drafts + 1
    firsts = np.concatenate(([0], np.cumsum(num_rows_of)))
    total = firsts[-1]
    # Rows of logits lie anywhere in a step's tokens; each is followed by the draft that it judges.
    token_ids = rng.integers(0, 2, 2 * total + 3)
    tokens_at = np.repeat(firsts[:-1], num_rows_of) + np.arange(total)
    chosen = np.stack([rng.integers(0, 2, total), rng.random(total) < 0.85], 1).astype(np.int32)
    rows = np.repeat(rng.permutation(NUM_ROWS)[:num_samples], num_rows_of)
    lengths = np.repeat(rng.integers(3, 40, num_samples), num_rows_of)

    expected, counts, ends = before.copy(), [], []
    for first, last in zip(firsts, firsts[1:] - 1, strict=False):
        count, at = 1, first
        while chosen[at, 1] and at < last and chosen[at, 0] == token_ids[tokens_at[at] + 1] and chosen[at + 1, 1]:
            count, at = count + 1, at + 1
        counts.append(count)
        ends.append(int(lengths[first]) + count)
        expected[places.computed + rows[first]] = ends[-1] - 1

    arena = words(before, device)
    samples = words(rows, device), words(lengths, device), words(firsts, device), words(tokens_at, device)
    ids = torch.tensor(token_ids, dtype=torch.int64, device=device)
    found, found_ends = accept_drafts(arena, places, words(chosen, device), samples, ids)
    assert found.tolist() == counts
    assert found_ends.tolist() == ends
    assert arena.tolist() == expected.tolist()
    if num_samples > 1:
        assert min(counts) == 1 < max(counts)


@pytest.mark.parametrize("lookup", [(1, 1), (1, 3), (2, 4), (3, 3)])
@pytest.mark.parametrize("max_drafts", [1, 3, 6])
def test_looking_up_against_the_host(lookup: tuple[int, int], max_drafts: int, device: torch.device) -> None:
    """Texts of three tokens, of one token to a whole row."""
    rng, places = np.random.default_rng(max_drafts), tables(max_drafts)
    before = random_arena(rng, places)
    before[:NUM_TOKENS] %= 3
    lengths = np.array([1, 2, 3, 5, 8, 20, 21, TOKEN_WIDTH])
    check_look_up(before, places, lengths, lookup, device)


@pytest.mark.parametrize("copy_at", [0, POSITIONS - 3, POSITIONS - 2, POSITIONS, 2 * POSITIONS + 1])
def test_copies_across_the_tiles_of_a_long_text(copy_at: int, device: torch.device) -> None:
    """One copy of the last four tokens, wherever tiles of positions end, and a later copy of the last two alone."""
    width, num_rows = 3 * POSITIONS + 9, 2
    places = tables(3, width, num_rows)
    before = np.random.default_rng(0).permutation(places.found + num_rows * 3 + SPARE).astype(np.int32)
    length = width - 2
    text = before[width : width + length]
    text[copy_at : copy_at + 4] = text[-4:]
    text[-20:-18] = text[-2:]
    for lookup in ((1, 4), (1, 2), (4, 6), (5, 6)):
        check_look_up(before, places, np.array([length]), lookup, device, rows=np.array([1]), num_rows=num_rows)


def check_look_up(
    before: np.ndarray,
    places: DraftTables,
    lengths: np.ndarray,
    lookup: tuple[int, int],
    device: torch.device,
    *,
    rows: np.ndarray | None = None,
    num_rows: int = NUM_ROWS,
) -> None:
    """A sample's first row of several says which row's text it is."""
    rng = np.random.default_rng(1)
    rows = rng.permutation(num_rows)[: len(lengths)] if rows is None else rows
    num_rows_of = rng.integers(1, 4, len(lengths))
    firsts = np.concatenate(([0], np.cumsum(num_rows_of)))
    all_rows = np.full(firsts[-1], num_rows - 1)
    all_rows[firsts[:-1]] = rows

    expected, counts = before.copy(), np.zeros(num_rows, np.int64)
    size = num_rows * places.max_drafts
    drafts = expected[places.found : places.found + size].reshape(num_rows, -1)
    table = before[: num_rows * places.token_width].reshape(num_rows, -1)
    PlainTexts(num_rows, [lookup[0]]).find_runs(table, rows, lengths, lookup[1], drafts, counts)

    arena = words(before, device)
    samples = words(all_rows, device), words(firsts, device), words(lengths, device)
    num_found = find_drafts(arena, places, samples, lookup)
    assert num_found.tolist() == counts[rows].tolist()
    assert arena.tolist() == expected.tolist()
