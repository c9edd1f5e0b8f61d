"""Kernels around the passes of a model that makes drafts, against loops over sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.triton.drafts import DraftTables
from quire.kernels.triton.model_drafts import SEQUENCES, begin_pass, last_tokens, write_behind, write_guesses
from quire.kernels.triton.rows import StepColumns
from tests.kernels.triton.test_drafts import NUM_ROWS, TOKEN_WIDTH, random_arena, tables, words


@pytest.mark.parametrize(("num_passed", "has_masks"), [(1, True), (SEQUENCES + 2, False), (SEQUENCES + 2, True)])
def test_where_a_pass_begins(num_passed: int, has_masks: bool, device: torch.device) -> None:
    """Some of a step's sequences, in another order, of which each brings its last known tokens, and perhaps masks."""
    rng = np.random.default_rng(num_passed)
    num_seqs = SEQUENCES + 5
    starts, num_drafts = rng.integers(20, 40, num_seqs), rng.integers(0, 4, num_seqs)
    counts, own = num_drafts + rng.integers(1, 9, num_seqs), rng.integers(1, 12, num_passed)
    sources = rng.permutation(num_seqs)[:num_passed]
    masks = np.maximum(num_drafts[sources] - 1, 0) if has_masks else 0
    query_start, own_start = (np.concatenate(([0], np.cumsum(each))) for each in (counts, own + masks))
    columns = StepColumns(*(words(each, device) for each in (range(num_seqs), starts, query_start)))
    given = (words(each, device) for each in (num_drafts, sources, own_start))
    found = begin_pass(columns, *given, has_masks=has_masks)
    ends = [starts[each] + counts[each] - num_drafts[each] for each in sources]
    assert found[1].tolist() == ends
    assert found[0].tolist() == [end - count for end, count in zip(ends, own, strict=True)]


@pytest.mark.parametrize("has_texts", [False, True])
@pytest.mark.parametrize("num_guesses", [1, SEQUENCES + 2])
def test_writing_guesses(num_guesses: int, has_texts: bool, device: torch.device) -> None:
    """Behind the known tokens of the first rows; the others, and their starts, stay as they were. An oracle's tokens
    come first where it knows some."""
    rng, place = np.random.default_rng(num_guesses), 2
    texts = NUM_ROWS * TOKEN_WIDTH + 7
    before = rng.integers(-3, 5, texts + NUM_ROWS * TOKEN_WIDTH).clip(-1).astype(np.int32)
    places = DraftTables(TOKEN_WIDTH, texts, texts, 3, texts if has_texts else -1)
    rows, ends = rng.permutation(NUM_ROWS), rng.integers(5, TOKEN_WIDTH - place, NUM_ROWS)
    guesses = rng.integers(10, 90, num_guesses)
    arena, starts = words(before, device), words(np.full(NUM_ROWS, -1), device)
    given = torch.tensor(guesses, device=device)
    write_guesses(arena, places, words(rows, device), words(ends, device), given, starts, place)
    expected, expected_starts = before.copy(), np.full(NUM_ROWS, -1)
    for index, guess in enumerate(guesses):
        at = rows[index] * TOKEN_WIDTH + ends[index] + place
        known = before[texts + at] if has_texts else -1
        expected[at] = known if known >= 0 else guess
        expected_starts[index] = ends[index] + place
    assert arena.tolist() == expected.tolist()
    assert starts.tolist() == expected_starts.tolist()


@pytest.mark.parametrize("has_texts", [False, True])
def test_writing_behind_known_tokens(has_texts: bool, device: torch.device) -> None:
    """Several tokens of a row at once, none of others. An oracle's tokens come first where it knows some."""
    rng = np.random.default_rng(3)
    texts = NUM_ROWS * TOKEN_WIDTH + 7
    before = rng.integers(-3, 5, texts + NUM_ROWS * TOKEN_WIDTH).clip(-1).astype(np.int32)
    rows, ends = rng.permutation(NUM_ROWS), rng.integers(5, TOKEN_WIDTH - 4, NUM_ROWS)
    sources, places = np.divmod(rng.permutation(NUM_ROWS * 4)[: SEQUENCES + 2], 4)
    tokens = rng.integers(10, 90, len(sources))
    arena = words(before, device)
    write_behind(
        arena,
        DraftTables(TOKEN_WIDTH, texts, texts, 3, texts),
        (words(rows, device), words(ends, device)),
        (words(sources, device), words(places, device)),
        torch.tensor(tokens, device=device),
        has_texts=has_texts,
    )
    expected = before.copy()
    for source, place, token in zip(sources, places, tokens, strict=True):
        at = rows[source] * TOKEN_WIDTH + ends[source] + place
        known = before[texts + at] if has_texts else -1
        expected[at] = known if known >= 0 else token
    assert arena.tolist() == expected.tolist()


def test_last_tokens_that_stay(device: torch.device) -> None:
    """Sampled sequences keep as many tokens as the arena has counted; the others keep all, whatever it says of them."""
    rng, num_seqs = np.random.default_rng(2), SEQUENCES + 3
    counts, starts = rng.integers(1, 6, num_seqs), rng.integers(0, 30, num_seqs)
    kept, is_sampled = rng.integers(1, counts + 1), rng.random(num_seqs) < 0.6
    rows, query_start = rng.permutation(NUM_ROWS)[:num_seqs], np.concatenate(([0], np.cumsum(counts)))
    places = tables(3)
    before = random_arena(rng, places)
    before[places.computed + rows] = np.where(is_sampled, starts + kept, 2**31 - 1)
    step = StepColumns(*(words(each, device) for each in (rows, starts, query_start)))
    found = last_tokens(words(before, device), places, step, words(is_sampled, device))
    assert found.tolist() == (query_start[:-1] + np.where(is_sampled, kept, counts) - 1).tolist()
