"""Banned token sequences: the last token is banned when the generated text ends with the ones before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.sampling.batch import SampleBatch
from quire.sampling.rules import ban

ANY = -1
"""Pads prefixes on the left; matches every token."""


class BadWordsColumn:
    """Per row a list of banned sequences, flat over all rows: (row, last token, prefix length, prefix)."""

    def __init__(self) -> None:
        self._lists: dict[int, list[list[int]]] = {}
        self._flat: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None

    def set(self, row: int, sequences: Sequence[Sequence[int]]) -> None:
        """Give `row` these banned sequences (each at least one token), in place of what it had."""
        if not sequences:
            self.clear(row)
            return
        self._lists[row] = [list(sequence) for sequence in sequences]
        self._flat = None

    def clear(self, row: int) -> None:
        if self._lists.pop(row, None) is not None:
            self._flat = None

    def apply(self, scores: np.ndarray, batch: SampleBatch, index_of_row: np.ndarray) -> None:
        """Ban, in place, the tokens that would complete a banned sequence. Only generated tokens can match a prefix.

        scores: [R, vocab_size] float32. index_of_row: [num_rows] int64, -1 where the row is not in the batch.
        """
        if self._flat is None:
            self._flat = self._flatten()
        rows, last, prefix_lengths, prefixes = self._flat
        index = index_of_row[rows]
        candidates = np.flatnonzero((index >= 0) & (prefix_lengths <= batch.num_generated[index]))
        index, prefixes = index[candidates], prefixes[candidates]
        width = prefixes.shape[1]
        # Columns before the sequence's start are only ever compared with ANY.
        columns = np.maximum(batch.lengths[index, None] + np.arange(-width, 0), 0)
        recent = batch.token_ids[batch.rows[index, None], columns]
        matches = ((prefixes == recent) | (prefixes == ANY)).all(axis=1)
        ban(scores, index[matches], last[candidates][matches])

    def _flatten(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        entries = [(row, sequence) for row, sequences in self._lists.items() for sequence in sequences]
        width = max((len(sequence) - 1 for _, sequence in entries), default=0)
        padded = [[ANY] * (width + 1 - len(sequence)) + sequence for _, sequence in entries]
        tokens = np.array(padded, np.int64).reshape(len(entries), width + 1)
        return (
            np.array([row for row, _ in entries], np.int64),
            tokens[:, -1],
            np.array([len(sequence) - 1 for _, sequence in entries], np.int64),
            tokens[:, :-1],
        )
