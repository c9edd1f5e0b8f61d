"""Banned token sequences: the last token is banned when the generated text ends with the ones before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.sampling.batch import SampleBatch
from quire.sampling.rules import ban
from quire.sampling.shared_lists import SharedLists


class Banned(NamedTuple):
    """Sequences whose prefixes have one length L. last: [N] int64. prefixes: [N, L] int32."""

    last: np.ndarray
    prefixes: np.ndarray


class BadWordsColumn:
    """Per row a list of banned sequences, flat over all rows, one table for each length of a prefix: no entry is wider
    than it has to be. Lists of one request are converted once."""

    def __init__(self) -> None:
        self._lists: SharedLists[Sequence[Sequence[int]], dict[int, Banned]] = SharedLists(_by_length)
        self._flat: list[tuple[np.ndarray, Banned]] | None = None

    def set(self, row: int, sequences: Sequence[Sequence[int]]) -> None:
        """Give `row` these banned sequences (each at least one token), in place of what it had."""
        if not sequences:
            self.clear(row)
            return
        self._lists.set(row, sequences)
        self._flat = None

    def clear(self, row: int) -> None:
        if self._lists.clear(row):
            self._flat = None

    def apply(self, scores: np.ndarray, batch: SampleBatch, index_of_row: np.ndarray) -> None:
        """Ban, in place, the tokens that would complete a banned sequence. Only generated tokens can match a prefix.

        scores: [R, vocab_size] float32. index_of_row: [num_rows] int64, -1 where the row is not in the batch.
        """
        if self._flat is None:
            self._flat = self._flatten()
        for rows, (last, prefixes) in self._flat:
            index = index_of_row[rows]
            length = prefixes.shape[1]
            candidates = np.flatnonzero((index >= 0) & (length <= batch.num_generated[index]))
            index = index[candidates]
            if length:
                columns = batch.lengths[index, None] + np.arange(-length, 0)
                recent = batch.token_ids[batch.rows[index, None], columns]
                matches = (prefixes[candidates] == recent).all(axis=1)
                index, candidates = index[matches], candidates[matches]
            ban(scores, index, last[candidates])

    @property
    def num_bytes(self) -> int:
        """What the flat tables and what they are made of hold."""
        tables = [table for made in self._lists.distinct() for table in made.values()]
        flat = self._flat or []
        size = sum(rows.nbytes for rows, _ in flat)
        return size + sum(last.nbytes + prefixes.nbytes for last, prefixes in [*tables, *(t for _, t in flat)])

    def _flatten(self) -> list[tuple[np.ndarray, Banned]]:
        """(rows [N] int64, what is banned in them), shortest prefixes first."""
        entries: dict[int, list[tuple[int, Banned]]] = {}
        for row, tables in self._lists:
            for length, table in tables.items():
                entries.setdefault(length, []).append((row, table))
        return [
            (
                np.repeat([row for row, _ in found], [len(table.last) for _, table in found]),
                Banned(
                    np.concatenate([table.last for _, table in found]),
                    np.concatenate([table.prefixes for _, table in found]),
                ),
            )
            for _, found in sorted(entries.items())
        ]


def _by_length(sequences: Sequence[Sequence[int]]) -> dict[int, Banned]:
    """The sequences by the lengths of their prefixes."""
    groups: dict[int, list[Sequence[int]]] = {}
    for sequence in sequences:
        groups.setdefault(len(sequence) - 1, []).append(sequence)
    tables = {}
    for length, group in groups.items():
        tokens = np.array(group, np.int64).reshape(len(group), length + 1)
        tables[length] = Banned(tokens[:, -1].copy(), tokens[:, :-1].astype(np.int32))
    return tables
