"""Per-row lists of tokens on the device: logit bias, stop tokens, banned sequences, allowed tokens.

One int32 tensor, laid out as `quire.kernels.triton.rules` says. It is made anew when rows have changed, not every step,
and never written again: a step that runs may still read the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

from quire.kernels.triton.rules import ALLOWED, BANNED, BIAS, HEADER_WORDS, STOP
from quire.sampling.shared_lists import SharedLists

Source = TypeVar("Source")

ENTRY_WORDS = {BIAS.value: 2, STOP.value: 1, BANNED.value: 3, ALLOWED.value: 1}


class RowLists:
    """The lists of `num_rows` rows. Most rows own none. Rows of one request have the same lists, which are converted
    once, and lie in the tensor once."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._device = device
        self._bias: SharedLists[dict[int, float], np.ndarray] = SharedLists(_bias_words)
        self._stop: SharedLists[Sequence[int], np.ndarray] = SharedLists(_token_words)
        self._banned: SharedLists[Sequence[Sequence[int]], np.ndarray] = SharedLists(_banned_words)
        self._allowed: SharedLists[Sequence[int], np.ndarray] = SharedLists(_token_words)
        self._tensor: torch.Tensor | None = None

    def set(
        self,
        row: int,
        bias: dict[int, float],
        stop_tokens: Sequence[int],
        banned_sequences: Sequence[Sequence[int]],
        allowed_tokens: Sequence[int],
    ) -> None:
        """Give `row` these lists, in place of what it had."""
        changed = [
            _replace(self._bias, row, bias),
            _replace(self._stop, row, stop_tokens),
            _replace(self._banned, row, banned_sequences),
            _replace(self._allowed, row, allowed_tokens),
        ]
        if any(changed):
            self._tensor = None

    def tensor(self) -> torch.Tensor:
        """[N] int32. Enqueues its copy to the device when rows have changed."""
        if self._tensor is None:
            words = torch.from_numpy(self._flatten())
            if self._device.type != "cpu":
                words = words.pin_memory()
            self._tensor = words.to(self._device, non_blocking=True)
        return self._tensor

    def _flatten(self) -> np.ndarray:
        header = np.zeros((self._num_rows, HEADER_WORDS.value), np.int32)
        parts, start = [header.reshape(-1)], header.size
        columns = ((BIAS, self._bias), (STOP, self._stop), (BANNED, self._banned), (ALLOWED, self._allowed))
        placed: dict[int, tuple[int, int]] = {}
        """(start, entries) of the words that lie in the tensor already, by identity."""
        for kind, column in ((kind.value, column) for kind, column in columns):
            for row, words in column:
                if id(words) not in placed:
                    placed[id(words)] = start, len(words) // ENTRY_WORDS[kind]
                    if kind == BANNED.value:
                        part, size = _placed(words, start)
                        placed[id(words)] = start, size
                    else:
                        part = words
                    parts.append(part)
                    start += len(part)
                header[row, 2 * kind : 2 * kind + 2] = placed[id(words)]
        return np.concatenate(parts)


def _replace(column: SharedLists[Source, np.ndarray], row: int, source: Source) -> bool:
    """Give `row` a list, or none where it is empty. Returns whether something has changed."""
    had = column.clear(row)
    if source:
        column.set(row, source)
    return had or bool(source)


def _token_words(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def _bias_words(bias: dict[int, float]) -> np.ndarray:
    """(token, bits of its bias) after one another."""
    pairs = np.empty((len(bias), 2), np.int32)
    pairs[:, 0] = list(bias)
    pairs[:, 1] = np.array(list(bias.values()), np.float32).view(np.int32)
    return pairs.reshape(-1)


def _banned_words(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """The number of sequences; an entry for each, with the start of its prefix among what follows; the prefixes."""
    entries: list[int] = []
    prefixes: list[int] = []
    for sequence in sequences:
        entries += [sequence[-1], len(sequence) - 1, len(prefixes)]
        prefixes += sequence[:-1]
    return np.array([len(sequences), *entries, *prefixes], np.int32)


def _placed(words: np.ndarray, start: int) -> tuple[np.ndarray, int]:
    """Entries and prefixes of banned sequences that stand at `start` of the tensor; how many entries."""
    count = int(words[0])
    placed = words[1:].copy()
    placed[2 : 3 * count : 3] += start + 3 * count
    return placed, count
