"""Lists of tokens for each row: logit bias, stop tokens, banned sequences, allowed tokens, in one array of 32-bit
words. A header has `HEADER_WORDS` words per row: start and number of entries by kind. Entries: bias (token, bits of the
float32), stop and allowed tokens (token), banned sequences (last token, length and start of the prefix)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from quire.step import SequenceSampling

BIAS, STOP, BANNED, ALLOWED = range(4)
HEADER_WORDS = 8
ENTRY_WORDS = (2, 1, 3, 1)


class Entries(NamedTuple):
    """N entries of one kind, for the host's rules. where: [N] int64, index of each one's row among the selected rows.
    tokens: [N] int32. words: int32, [N, 1] bits of the bias, or [N, length of the prefix]."""

    where: np.ndarray
    tokens: np.ndarray
    words: np.ndarray


class RowLists:
    """Token lists (biases, bans, allowed tokens) of `num_rows` rows."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        converters = (_bias_words, _token_words, _banned_words, _token_words)
        self._kinds = [SharedLists(convert) for convert in converters]
        self._words: np.ndarray | None = None
        self._selected: dict[int, tuple[np.ndarray, list[Entries]]] = {}
        """Kind -> (rows, their last selection): most steps have the rows of the step before."""

    def set(self, row: int, sampling: SequenceSampling) -> None:
        params = sampling.params
        sources: tuple[Collection[Any], ...] = (
            params.logit_bias or {},
            sampling.stop_token_ids if params.min_tokens else (),
            sampling.bad_token_sequences,
            params.allowed_token_ids or (),
        )
        for lists, source in zip(self._kinds, sources, strict=True):
            if lists.set(row, source):
                self._change()

    def clear(self, row: int) -> None:
        for lists in self._kinds:
            if lists.clear(row):
                self._change()

    def words(self) -> np.ndarray:
        """Array of all lists, [N] int32, which kernels read by `spans`; changed lists make a new array."""
        if self._words is None:
            self._words = self._flatten()
        return self._words

    def spans(self, kind: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(start, number of entries) of each row's list of a kind. rows, results: [R]."""
        header = self.words()[: self._num_rows * HEADER_WORDS].reshape(self._num_rows, HEADER_WORDS)
        spans = header[rows, 2 * kind : 2 * kind + 2].astype(np.int64)
        return spans[:, 0], spans[:, 1]

    def select(self, kind: int, rows: np.ndarray) -> list[Entries]:
        """Entries of a kind in `rows` ([R] int64), grouped by length of prefix."""
        rows_before, selected = self._selected.get(kind, (None, []))
        if rows_before is None or not np.array_equal(rows_before, rows):
            selected = self._select(kind, rows)
            self._selected[kind] = rows.copy(), selected
        return selected

    def _select(self, kind: int, rows: np.ndarray) -> list[Entries]:
        words = self.words()
        starts, counts = self.spans(kind, rows)
        index = np.repeat(np.arange(len(rows)), counts)
        # Entry n of all is entry n - (number of earlier rows' entries) of its row.
        starts -= (np.cumsum(counts) - counts) * ENTRY_WORDS[kind]
        entries = np.arange(len(index)) * ENTRY_WORDS[kind] + starts[index]
        tokens = words[entries]
        if kind != BANNED:
            values = words[entries + 1 if kind == BIAS else entries]
            return [Entries(index, tokens, values[:, None])]
        sizes, prefixes = words[entries + 1], words[entries + 2]
        groups = ((size, sizes == size) for size in np.flatnonzero(np.bincount(sizes)).tolist())
        return [
            Entries(index[found], tokens[found], words[prefixes[found][:, None] + np.arange(size)])
            for size, found in groups
        ]

    def _change(self) -> None:
        self._words = None
        self._selected.clear()

    def _flatten(self) -> np.ndarray:
        header = np.zeros((self._num_rows, HEADER_WORDS), np.int32)
        parts, start = [header.reshape(-1)], header.size
        for kind, lists in enumerate(self._kinds):
            for words, rows in lists:
                count = int(words[0]) if kind == BANNED else len(words) // ENTRY_WORDS[kind]
                part = _placed(words, start, count) if kind == BANNED else words
                header[rows, 2 * kind : 2 * kind + 2] = start, count
                parts.append(part)
                start += len(part)
        return np.concatenate(parts)


class SharedLists:
    """Converted lists of one kind. Rows with the same list object share one conversion, dropped with the last of
    them."""

    def __init__(self, convert: Callable[[Any], np.ndarray]) -> None:
        self._convert = convert
        self._key_of_row: dict[int, int] = {}
        self._entries: dict[int, tuple[object, np.ndarray, set[int]]] = {}
        """Identity of a list -> (the list, so its identity stays unique; its words; its rows)."""

    def set(self, row: int, source: Collection[Any]) -> bool:
        """Replace the list of `row`; an empty one clears it. Returns True if it changed."""
        had_one = self.clear(row)
        if not source:
            return had_one
        key = id(source)
        if key not in self._entries:
            self._entries[key] = source, self._convert(source), set()
        self._entries[key][2].add(row)
        self._key_of_row[row] = key
        return True

    def clear(self, row: int) -> bool:
        """Remove the list of `row`. Returns False if it had none."""
        key = self._key_of_row.pop(row, None)
        if key is None:
            return False
        rows = self._entries[key][2]
        rows.remove(row)
        if not rows:
            del self._entries[key]
        return True

    def __iter__(self) -> Iterator[tuple[np.ndarray, list[int]]]:
        """(converted list, its rows), once for each list."""
        return ((words, list(rows)) for _, words, rows in self._entries.values())


def _token_words(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def _bias_words(bias: Mapping[int, float]) -> np.ndarray:
    pairs = np.empty((len(bias), 2), np.int32)
    pairs[:, 0] = list(bias)
    pairs[:, 1] = np.array(list(bias.values()), np.float32).view(np.int32)
    return pairs.reshape(-1)


def _banned_words(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    entries: list[int] = []
    prefixes: list[int] = []
    for sequence in sequences:
        entries += [sequence[-1], len(sequence) - 1, len(prefixes)]
        prefixes += sequence[:-1]
    return np.array([len(sequences), *entries, *prefixes], np.int32)


def _placed(words: np.ndarray, start: int, count: int) -> np.ndarray:
    placed = words[1:].copy()
    placed[2 : 3 * count : 3] += start + 3 * count
    return placed
