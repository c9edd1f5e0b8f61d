"""Per-row lists of tokens on the device: logit bias, stop tokens, banned sequences, allowed tokens.

One int32 tensor, laid out as `quire.kernels.triton.rules` says. It is made anew when rows have changed, not every step,
and never written again: a step that runs may still read the one before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.kernels.triton.rules import ALLOWED, BANNED, BIAS, HEADER_WORDS, STOP

KINDS = (BIAS.value, STOP.value, BANNED.value, ALLOWED.value)
ENTRY_WORDS = {BIAS.value: 2, STOP.value: 1, BANNED.value: 3, ALLOWED.value: 1}


class RowLists:
    """The lists of `num_rows` rows. Most rows own none."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._device = device
        self._of_row: dict[int, dict[int, np.ndarray]] = {}
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
        lists = {
            BIAS.value: _bias_words(bias),
            STOP.value: np.array(stop_tokens, np.int32),
            BANNED.value: _banned_words(banned_sequences),
            ALLOWED.value: np.array(allowed_tokens, np.int32),
        }
        owned = {kind: words for kind, words in lists.items() if len(words)}
        if self._of_row.pop(row, None) is not None or owned:
            self._tensor = None
        if owned:
            self._of_row[row] = owned

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
        for row, lists in self._of_row.items():
            for kind in KINDS:
                words = lists.get(kind)
                if words is None:
                    continue
                size = len(words) // ENTRY_WORDS[kind]
                if kind == BANNED.value:
                    words, size = _placed(words, start)
                header[row, 2 * kind : 2 * kind + 2] = start, size
                parts.append(words)
                start += len(words)
        return np.concatenate(parts)


def _bias_words(bias: dict[int, float]) -> np.ndarray:
    """(token, bits of its bias) after one another."""
    pairs = np.empty((len(bias), 2), np.int32)
    pairs[:, 0] = list(bias)
    pairs[:, 1] = np.array(list(bias.values()), np.float32).view(np.int32)
    return pairs.reshape(-1)


def _banned_words(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """The number of sequences; an entry for each, with the start of its prefix among what follows; the prefixes."""
    if not sequences:
        return np.empty(0, np.int32)
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
