"""Prompts of models whose chat templates write one token where an image begins (Gemma 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

MOST_LINES = 31
"""Newlines of the longest token looked for."""
LINES_AROUND = 2
"""Newlines before and after an image's tokens."""


class Encoder(Protocol):
    """Tokenizer, as this room sees it: text to token ids."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...


@dataclass(frozen=True)
class ImageMarks:
    """Writer of the tokens around images, for prompts that lack them. begin, end: tokens before and after an image's.
    lines: tokens of 1, 2 ... newlines, each one token."""

    begin: int
    end: int
    lines: Mapping[int, int]

    @classmethod
    def of(cls, begin: int, end: int, tokenizer: Encoder | None) -> ImageMarks:
        """Marks of a model. tokenizer: None if prompts are token ids; then no newlines are written."""
        lines: dict[int, int] = {}
        if tokenizer is not None:
            encoded = [tokenizer.encode("\n" * count, add_special_tokens=False) for count in range(1, MOST_LINES + 1)]
            lines = {count: token_ids[0] for count, token_ids in enumerate(encoded, 1) if len(token_ids) == 1}
        return cls(begin, end, lines)

    def written(self, token_ids: Sequence[int], image_token: int, counts: Sequence[int]) -> list[int]:
        """Prompt with an image's tokens behind each `begin`, and the newlines and `end` around them, as if its text had
        been tokenised with them. counts: tokens of each image, one per `begin`."""
        lengths = {token: count for count, token in self.lines.items()}
        found: list[int] = []
        run: list[int] = []
        added, left = 0, iter(counts)
        for token in token_ids:
            if token in lengths:
                run.append(token)
                continue
            if token == self.begin:
                added += LINES_AROUND
            found += self._newlines(sum(lengths[each] for each in run) + added) if added else run
            found.append(token)
            run, added = [], 0
            if token == self.begin:
                found += [image_token] * next(left)
                found.append(self.end)
                added = LINES_AROUND
        return found + (self._newlines(sum(lengths[each] for each in run) + added) if added else run)

    def _newlines(self, count: int) -> list[int]:
        found = []
        for length in sorted(self.lines, reverse=True):
            while count >= length:
                found.append(self.lines[length])
                count -= length
        return found
