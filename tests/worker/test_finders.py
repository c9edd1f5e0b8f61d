"""Drafts found in texts: plain and native, of which the native one keeps an index that grows with the text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.speculation import SpeculationConfig, SuffixConfig
from quire.kernels.cpu import _native
from quire.worker.finders import RUNS, Corpora, CustomFinder, TextFinder, run_lengths
from quire.worker.plain_texts import PlainCorpus, PlainTexts

KINDS: dict[str, Any] = {"plain": (PlainTexts, PlainCorpus), "native": (_native.DraftTexts, _native.Corpus)}
SUFFIX = SuffixConfig(depth=12, factor=1.0, least=0.1)
Table = np.ndarray


class Rows:
    """A finder over a table of three rows; behind each text lies something else."""

    def __init__(self, kind: str, config: SpeculationConfig, capacity: int = 400) -> None:
        self.finder = TextFinder(3, config, *KINDS[kind])
        self.table = np.full((3, capacity), 7, np.int32)
        self.drafts = np.full((3, config.max_drafts), -1, np.int32)
        self.counts = np.array([9, 9, 9])

    def begin(self, row: int, tokens: list[int], scope: str = "", prediction: tuple[int, ...] = ()) -> None:
        self.table[row, : len(tokens)] = tokens
        self.finder.rewrite(row, 0)
        self.finder.begin_text(row, len(tokens), scope, prediction)

    def end(self, row: int, tokens: list[int]) -> None:
        self.table[row, : len(tokens)] = tokens
        self.finder.end_text(row, self.table[row, : len(tokens)])

    def find(self, tokens: list[int], row: int = 1) -> list[int]:
        """The drafts of one row, which has these tokens now."""
        self.table[row, : len(tokens)] = tokens
        others = [each for each in range(3) if each != row]
        before = self.drafts[others].copy(), self.counts[others].copy()
        rows, lengths = np.array([row]), np.array([len(tokens)])
        total = self.finder.find_drafts(self.table, rows, lengths, self.drafts, self.counts)
        assert total == (self.counts[row] > 0)
        assert (self.drafts[others] == before[0]).all()
        assert (self.counts[others] == before[1]).all()
        found: list[int] = self.drafts[row, : self.counts[row]].tolist()
        return found


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize(
    ("tokens", "least", "most", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], 1, 3, [3, 4, 5, 1]),
        ([1, 2, 3, 9, 2, 4, 1, 2], 1, 3, [3, 9, 2, 4]),  # two tokens are a better copy than the later one of one
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, 2, [4, 1, 2, 4]),  # of two copies the later one, and on into the drafts
        ([5, 5], 1, 3, [5, 5, 5, 5]),
        ([1, 2, 3, 4, 5, 1, 2], 3, 3, []),
        ([1, 2, 3], 1, 3, []),
        ([4], 1, 3, []),
        ([8, 1, 2, 1, 2], 2, 9, [1, 2, 1, 2]),
        ([8, 1, 2, 1, 2], 2, 64, [1, 2, 1, 2]),
    ],
)
def test_the_longest_run_at_its_latest_place(
    kind: str, tokens: list[int], least: int, most: int, expected: list[int]
) -> None:
    rows = Rows(kind, SpeculationConfig(4, least, most))
    rows.begin(1, tokens[:1])
    assert rows.find(tokens) == expected


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 4),
    st.sampled_from([0, 1, 2, 3, 7, 20]),
    st.integers(1, 6),
    st.integers(1, 9),
)
def test_an_index_that_grows(tokens: list[int], least: int, more: int, width: int, stride: int) -> None:
    """The native finder sees the text again and again, some tokens longer each time."""
    plain, native = (Rows(name, SpeculationConfig(width, least, least + more)) for name in KINDS)
    for size in [*range(1, len(tokens), stride), len(tokens)]:
        assert native.find(tokens[:size]) == plain.find(tokens[:size])


def test_a_long_text(kind: str) -> None:
    """Past the sizes at which an index grows: what repeats itself is at the beginning."""
    rows = Rows(kind, SpeculationConfig(3, 5, 5), capacity=3000)
    text = [1, 2, 3, 4, 5, 6, 7, 8, *range(100, 2500), 1, 2, 3, 4, 5]
    for size in (200, 257, 1500, len(text)):
        found = rows.find(text[:size])
    assert found == [6, 7, 8]


def test_tokens_that_change(kind: str) -> None:
    """A row begins again with another text, becomes shorter, and has a token replaced: what was there before is not
    found."""
    rows = Rows(kind, SpeculationConfig(2, 2, 3))
    assert rows.find([1, 2, 3, 4, 1, 2]) == [3, 4]
    rows.begin(1, [5, 6, 7])
    assert rows.find([5, 6, 7, 1, 2]) == []
    assert rows.find([5, 6, 7, 8, 9, 5, 6]) == [7, 8]
    rows.finder.rewrite(1, 1)
    assert rows.find([5, 1, 7, 8, 9, 5, 1]) == [7, 8]
    assert rows.find([5, 1, 7, 5, 1]) == [7, 5]


def test_rows_outside_the_table_are_refused() -> None:
    texts, drafts, counts = _native.DraftTexts(2, [1]), np.zeros((2, 1), np.int32), np.zeros(2, np.int64)
    table = np.zeros((2, 4), np.int32)
    for row, length in ((2, 1), (-1, 1), (0, 5), (0, 0)):
        with pytest.raises(ValueError, match="outside"):
            texts.find_runs(table, np.array([row]), np.array([length]), 1, drafts, counts)
    with pytest.raises(ValueError, match="no such request slot"):
        texts.begin(2, None, np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="lengths of runs"):
        _native.DraftTexts(2, [])


@pytest.mark.parametrize(
    ("least", "most", "lengths"),
    [(5, 5, [5]), (2, 4, [2, 3, 4]), (1, 4, [1, 2, 3, 4]), (1, 5, [1, 2, 3, 5]), (1, 64, [1, 22, 43, 64])],
)
def test_lengths_of_runs(least: int, most: int, lengths: list[int]) -> None:
    assert run_lengths(least, most) == lengths


# -- votes ---------------------------------------------------------------------------------------------------------


def suffix_rows(kind: str, width: int = 8, **fields: Any) -> Rows:
    return Rows(kind, SpeculationConfig(width, suffix=SuffixConfig(**{"depth": 12, **fields})))


def test_as_many_drafts_as_tokens_match(kind: str) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    assert suffix_rows(kind).find([*text, 9, 1, 2, 3]) == [4, 5, 6]
    assert suffix_rows(kind, factor=2.0).find([*text, 9, 1, 2]) == [3, 4, 5, 6]
    assert suffix_rows(kind, factor=0.5).find([*text, 9, 1, 2]) == [3]
    assert suffix_rows(kind, depth=5, factor=9.0).find([*text, 9, 1, 2, 3]) == [4, 5, 6, 7], (
        "one token of the match counts"
    )
    assert suffix_rows(kind, width=2).find([*text, 9, 1, 2, 3, 4]) == [5, 6]
    assert suffix_rows(kind).find([*text, 9, 1]) == []


def test_the_likelier_way(kind: str) -> None:
    """Two of three places go on with 5; a run that matches more, though, is asked first."""
    text = [0, 1, 2, 4, 0, 1, 2, 5, 6, 3, 1, 2, 5, 7]
    assert suffix_rows(kind).find([*text, 9, 1, 2]) == [5, 7], "the later one of two that are as likely"
    assert suffix_rows(kind, least=0.5).find([*text, 9, 1, 2]) == [5]
    assert suffix_rows(kind, least=0.7).find([*text, 9, 1, 2]) == []
    assert suffix_rows(kind, least=0.7).find([*text, 3, 1, 2]) == [5, 7, 3]


def test_a_text_that_repeats_itself(kind: str) -> None:
    assert suffix_rows(kind).find([1, 2, 3] * 3) == [1, 2, 3, 1, 2, 3]


def test_outputs_of_the_same_scope(kind: str) -> None:
    """An output drafts for later requests of its scope, with the last tokens of its prompt alone."""
    rows = suffix_rows(kind)
    rows.begin(0, [90, 91, *range(10, 30)], "a")
    rows.end(0, [90, 91, *range(10, 30), 30, 31, 32, 33, 34])
    for scope, text, expected in (
        ("a", [1, 28, 29], [30, 31]),
        ("a", [1, 31, 32], [33, 34]),
        ("a", [1, 33, 34], []),
        ("a", [1, 90, 91], []),
        ("b", [1, 31, 32], []),
        ("", [1, 31, 32], []),
    ):
        rows.begin(1, text[:1], scope)
        assert rows.find(text) == expected


def test_a_preempted_output_is_kept_once(kind: str) -> None:
    """It comes back with its tokens so far; what it gets then is kept, too, and a child begins where its parent was."""
    rows = suffix_rows(kind)
    rows.begin(0, [1], "a")
    rows.end(0, [1, 20, 21, 22])
    rows.begin(0, [1, 20, 21, 22], "a")
    rows.finder.copy_text(0, 2, 4)
    rows.end(0, [1, 20, 21, 22])
    rows.end(2, [1, 20, 21, 22, 23, 24])
    rows.begin(1, [5], "a")
    assert rows.find([5, 20, 21]) == [22, 23]
    assert rows.find([5, 22, 23]) == [24]


def test_no_texts_are_kept(kind: str) -> None:
    rows = suffix_rows(kind, max_texts=0)
    rows.begin(0, [1], "a")
    rows.end(0, [1, 20, 21, 22])
    rows.begin(1, [5], "a")
    assert rows.find([5, 20, 21]) == []


def test_old_texts_are_dropped(kind: str) -> None:
    """By their tokens, and by their number."""
    make_texts, make = KINDS[kind]
    corpus = make(60, 10**6)
    first = corpus.num_bytes
    for number in range(100):
        corpus.add(np.arange(number, number + 9, dtype=np.int32))
    assert first < corpus.num_bytes < 20_000
    corpus.add(np.arange(1000, dtype=np.int32))
    few = make(10**4, 4)
    for number in range(6):
        few.add(np.arange(10 * number, 10 * number + 9, dtype=np.int32))
    texts, found = make_texts(1, list(RUNS)), {}
    for number in range(6):
        table, drafts, counts = np.zeros((1, 9), np.int32), np.zeros((1, 8), np.int32), np.zeros(1, np.int64)
        table[0, :3] = [0, 10 * number + 3, 10 * number + 4]
        texts.begin(0, few, np.zeros(0, np.int32))
        texts.find_likely(table, np.array([0]), np.array([3]), 12, 1.0, 0.1, drafts, counts)
        found[number] = counts[0] > 0
    assert found == {0: False, 1: False, 2: True, 3: True, 4: True, 5: True}


def test_scopes_that_are_not_used_are_dropped() -> None:
    corpora = Corpora(PlainCorpus, 10, max_bytes=9_000)
    for scope in ("a", "b", "c"):
        corpora.add_output(scope, np.arange(100, dtype=np.int32))
    kept = corpora.of("a")
    for number in range(4):
        corpora.add_output(f"n{number}", np.arange(100, dtype=np.int32))
    assert len(corpora) == 4
    assert corpora.of("a") is not kept, "dropped, and begun again"
    other = corpora.of("n3")
    corpora.add_output("d", np.arange(100, dtype=np.int32))
    assert corpora.of("n3") is other


# -- predictions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_prediction_comes_first(kind: str, method: str) -> None:
    """It begins with the prompt's last tokens, so that its first token is the first draft."""
    config = SpeculationConfig(3, 2, 3, suffix=SUFFIX if method == "suffix" else None)
    rows = Rows(kind, config)
    prompt, prediction = [1, 2, 40, 41, 1, 2], (1, 2, 30, 31, 32, 33, 30, 31, 34, 35)
    rows.begin(1, prompt, prediction=prediction)
    assert rows.find(prompt) == [30, 31, 32]
    assert rows.find([*prompt, 30, 31]) == [32, 33, 30]
    assert rows.find([*prompt, 30, 31, 77, 30, 31]) == [32, 33, 30], "the next place from the last one on"
    assert rows.find([*prompt, 30, 31, 77, 30, 31, 32, 33]) == [30, 31, 34]
    assert rows.find([*prompt, 30, 31, 77, 30, 31, 32, 33, 30, 31]) == [34, 35]
    assert rows.find([*prompt, 34, 35]) == [], "its end"
    own = rows.find([*prompt, 88, 89, 41, 1, 88, 89])
    assert own[:2] == [41, 1], "else its own text"
    rows.begin(1, prompt)
    assert 30 not in rows.find(prompt)


# -- at random -----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=6),
    st.sampled_from([4, 7, 24]),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    st.booleans(),
)
def test_votes_at_random(texts: list[list[int]], depth: int, factor: float, least: float, has_prediction: bool) -> None:
    """Each text ends and drafts for the next one; in the middle of each one a step looks up, too."""
    config = SpeculationConfig(5, suffix=SuffixConfig(depth, 4, factor, least))
    plain, native = (Rows(name, config) for name in KINDS)
    for text in texts:
        prediction = tuple(text[::2]) if has_prediction else ()
        for rows in (plain, native):
            rows.begin(1, text[:2], "a", prediction)
        for size in {len(text) // 2, len(text) - 1, len(text)} - {0}:
            assert native.find(text[:size]) == plain.find(text[:size])
        for rows in (plain, native):
            rows.end(1, text)


# -- an operator's own ---------------------------------------------------------------------------------------------


class Hostile:
    """Too many guesses, and some that are no tokens."""

    def __init__(self, max_drafts: int) -> None:
        self.most = max_drafts

    def propose(self, token_ids: np.ndarray) -> list[int]:
        with pytest.raises(ValueError, match="read-only"):
            token_ids[0] = 1
        return {1: [5] * 99, 2: [], 3: [4, 97, 5], 4: [-1, 2], 5: [2**40]}[len(token_ids)]


def test_an_operators_class_is_not_trusted() -> None:
    finder = CustomFinder(f"{__name__}:Hostile", 3, 97)
    rows, drafts, counts = np.arange(5), np.full((5, 3), 9, np.int32), np.full(5, 9)
    table = np.ones((5, 9), np.int32)
    assert finder.find_drafts(table, rows, np.arange(1, 6), drafts, counts) == 2
    assert counts.tolist() == [3, 0, 1, 0, 0]
    assert drafts[0].tolist() == [5, 5, 5]
    assert drafts[2, 0] == 4
    table[0, 0] = 2  # still writable
