"""Sentencepiece's BPE: repeatedly join the neighbours whose union has the highest score, the first of equals.

The `tokenizers` library, which would make other pieces, gets these pieces as words.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from quire.tokenization.vocabulary_limits import check_pieces

_LONGEST_PART = 2**13
"""Maximum characters joined at once. Only a longer text without natural cuts is cut here."""
_LONGEST_KEPT = 64
_MOST_KEPT = 2**16
_MOST_NESTED = 64
"""Maximum nesting of groups in a pattern."""


class PieceMerger:
    """Thread-safe.

    scores: score of each piece that joining may make. unused: pieces among these that are split again at the end.
        whole: texts that are always tokens (control pieces, the user's), never joined; the longest match wins. space:
        character before which texts are usually cut.
    """

    def __init__(
        self, scores: Mapping[str, float], unused: Collection[str], whole: Collection[str], space: str
    ) -> None:
        """Raises ModelLoadError for a piece that is too long."""
        self._scores = dict(scores)
        self._unused = frozenset(unused)
        self._whole = any_of(whole)
        self._joined: set[tuple[str, str]] = set()
        check_pieces("the vocabulary", self._scores)
        for piece in self._scores:
            self._joined.update(itertools.pairwise(piece))
        # A word is a run of other characters with the spaces before it. A few characters may also merge with a space
        # after them.
        before_space = {first for first, second in self._joined if second == space and first != space}
        other = f"[^{re.escape(space)}]"
        word = f"{re.escape(space)}*{other}*"
        if before_space:
            word += f"(?:(?<=[{''.join(map(re.escape, sorted(before_space)))}]){re.escape(space)}+{other}*)*"
        self._word = re.compile(word)
        self._kept: dict[str, tuple[str, ...]] = {}
        self._last_long: tuple[str, tuple[str, ...]] = ("", ())

    def __call__(self, text: str) -> list[str]:
        """Pieces of a normalized text; adjacent unknown characters form one text."""
        parts = [text] if self._whole is None else self._whole.split(text)
        found: list[str] = []
        for place, part in enumerate(parts):
            if place % 2:
                found.append(part)
            elif part:
                found += self._with_unknown_joined(self._pieces(part))
        return found

    def _with_unknown_joined(self, pieces: Iterator[str]) -> Iterator[str]:
        unknown = ""
        for piece in pieces:
            if piece not in self._scores:
                unknown += piece
                continue
            if unknown:
                yield unknown
                unknown = ""
            yield piece
        if unknown:
            yield unknown

    def _pieces(self, text: str) -> Iterator[str]:
        for word in self._word.findall(text):
            pieces = self._kept.get(word)
            if pieces is not None:
                yield from pieces
            elif word:
                pieces = tuple(self._pieces_of_word(word))
                self._keep(word, pieces)
                yield from pieces

    def _pieces_of_word(self, word: str) -> Iterator[str]:
        start = 0
        for end in self._cuts(word):
            part = word[start:end]
            start = end
            if len(part) == 1:
                yield part
                continue
            last, pieces = self._last_long  # the parts of a long run of one character are all equal
            if part != last:
                found = self._kept.get(part)
                pieces = tuple(self._merged(part)) if found is None else found
                self._keep(part, pieces)
            yield from pieces

    def _cuts(self, word: str) -> Iterator[int]:
        joined, start = self._joined, 0
        for end, pair in enumerate(itertools.pairwise(word), 1):
            if pair not in joined or end - start == _LONGEST_PART:
                start = end
                yield end
        yield len(word)

    def _keep(self, part: str, pieces: tuple[str, ...]) -> None:
        if len(part) <= _LONGEST_KEPT:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[part] = pieces
        elif len(part) == _LONGEST_PART:
            self._last_long = part, pieces

    def _merged(self, part: str) -> Iterator[str]:
        scores, size = self._scores, len(part)
        symbols, before, behind = list(part), list(range(-1, size - 1)), list(range(1, size + 1))
        candidates: list[tuple[float, int, int]] = []

        def consider(left: int, right: int) -> None:
            if left >= 0 and right < size:
                union = symbols[left] + symbols[right]
                score = scores.get(union)
                if score is not None:
                    heapq.heappush(candidates, (-score, left, len(union)))

        made_of: dict[str, tuple[str, str]] = {}
        for place in range(size - 1):
            consider(place, place + 1)
        while candidates:
            _, left, length = heapq.heappop(candidates)
            right = behind[left]
            # Skip a candidate one of whose symbols has merged since.
            if not symbols[left] or right == size or len(symbols[left]) + len(symbols[right]) != length:
                continue
            union = symbols[left] + symbols[right]
            if union in self._unused:
                made_of[union] = symbols[left], symbols[right]
            symbols[left], symbols[right] = union, ""
            behind[left] = behind[right]
            if behind[left] < size:
                before[behind[left]] = left
            consider(before[left], left)
            consider(left, behind[left])
        for symbol in symbols:
            if symbol:
                yield from _taken_apart(symbol, made_of)


def _taken_apart(symbol: str, made_of: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    waiting = [symbol]
    while waiting:
        last = waiting.pop()
        if last in made_of:
            waiting += reversed(made_of[last])
        else:
            yield last


def any_of(texts: Collection[str]) -> re.Pattern[str] | None:
    """Pattern with one group that matches any of the texts, longest first; None for no texts."""
    return re.compile(f"({_branches(sorted(set(texts)), _MOST_NESTED)})") if texts else None


def _branches(texts: Sequence[str], levels: int) -> str:
    if levels == 0:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    branches = []
    for _, group in itertools.groupby(texts, key=lambda text: text[:1]):
        same = list(group)
        start = _common_start(same[0], same[-1])
        rest = [text[len(start) :] for text in same if text != start]
        inner = f"(?:{_branches(rest, levels - 1)})" if rest else ""
        branches.append(re.escape(start) + inner + ("?" if inner and len(rest) < len(same) else ""))
    return "|".join(branches)


def _common_start(a: str, b: str) -> str:
    return a[: next((place for place, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), len(a))]
