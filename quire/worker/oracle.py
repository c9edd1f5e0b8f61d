"""Drafts that replay a recorded run, for benchmarks with a chosen acceptance."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from quire.worker.finders import NO_TOKENS, NoFinder


class Oracle(NoFinder):
    """Finder of drafts that knows the texts to come. A request's `prediction` is its whole text, prompt and output.
    Each draft is the token of that text with probability `rate`, else another one; which it is depends on seed, text
    and position."""

    def __init__(self, num_rows: int, rate: float, seed: int, vocab_size: int) -> None:
        self._rate, self._seed, self._vocab_size = rate, seed, vocab_size
        self._texts = [NO_TOKENS] * num_rows

    def begin_text(self, row: int, num_tokens: int, scope: str, prediction: Sequence[int]) -> None:
        text = np.array(prediction, np.int32)
        drawn = np.random.default_rng((self._seed, zlib.crc32(text.tobytes()))).random(len(text))
        self._texts[row] = np.where(drawn < self._rate, text, (text + 1) % self._vocab_size)

    def copy_text(self, source: int, destination: int, num_tokens: int) -> None:
        self._texts[destination] = self._texts[source]

    def padded_text(self, row: int, width: int) -> np.ndarray:
        """Row's drafts by position, [width] int32, -1 where none is known."""
        found, text = np.full(width, -1, np.int32), self._texts[row][:width]
        found[: len(text)] = text
        return found

    def overwrite(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Replace a drafter's tokens, [R], at positions, [R], where the row's text, [R], is known. For benchmarks with
        a known acceptance."""
        found = tokens.copy()
        for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            text = self._texts[row]
            if position < len(text):
                found[index] = text[position]
        return found

    def find_drafts(
        self, table: np.ndarray, rows: np.ndarray, lengths: np.ndarray, drafts: np.ndarray, counts: np.ndarray
    ) -> int:
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            tokens = self._texts[row][length : length + drafts.shape[1]]
            counts[row] = len(tokens)
            drafts[row, : len(tokens)] = tokens
        return int((counts[rows] > 0).sum())
