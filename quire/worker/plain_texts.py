"""Draft look-up by scanning whole texts: the reference for the native `DraftTexts` and `Corpus`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.worker.finders import MOST_PLACES, NO_TOKENS, PREDICTED_MATCH, RUNS, Corpus


class PlainCorpus:
    """Corpus of ended outputs in Python, without the native module. halves: newer and older texts, each after a
    separator that no sequence contains."""

    def __init__(self, max_tokens: int, max_texts: int) -> None:
        self._most = max_tokens // 2, (max_texts + 1) // 2
        self._num_texts = 0
        self.halves = [NO_TOKENS, NO_TOKENS]

    @property
    def num_bytes(self) -> int:
        return 20 * sum(map(len, self.halves))

    def add(self, text: np.ndarray) -> None:
        max_tokens, max_texts = self._most
        text = text[max(0, len(text) - max_tokens + 1) :]
        if not len(text) or max_texts < 1:
            return
        if len(self.halves[0]) + len(text) + 1 > max_tokens or self._num_texts == max_texts:
            self.halves, self._num_texts = [NO_TOKENS, self.halves[0]], 0
        self.halves[0] = np.concatenate([self.halves[0], np.array([-1], np.int32), text])
        self._num_texts += 1


class Place(NamedTuple):
    """Place that drafts may come from. behind: tokens after it. matched: number of tokens before it that equal
    the sequence's end. is_own: True if it is in the sequence's own text, which the drafts continue."""

    behind: list[int]
    matched: int
    is_own: bool

    def token_at(self, path: list[int]) -> int:
        """Token that followed here after the drafts `path`; -1 beyond the text."""
        at = len(path)
        if at < len(self.behind):
            return self.behind[at]
        return path[at - len(self.behind)] if self.is_own else -1


class PlainTexts:
    """Texts of running sequences to look drafts up in, in Python, without the native module."""

    def __init__(self, num_rows: int, lengths: list[int]) -> None:
        self._least = lengths[0]
        self._corpora: list[PlainCorpus | None] = [None] * num_rows
        self._predictions = [NO_TOKENS] * num_rows
        self._places = [0] * num_rows
        """Place in the prediction of the last drafts."""

    def begin(self, row: int, corpus: Corpus | None, prediction: np.ndarray) -> None:
        assert corpus is None or isinstance(corpus, PlainCorpus), "a corpus of the same kind"
        self._corpora[row], self._predictions[row], self._places[row] = corpus, prediction, 0

    def rewrite(self, row: int, position: int) -> None:
        """Does nothing."""

    def find_runs(
        self,
        table: np.ndarray,
        rows: np.ndarray,
        lengths: np.ndarray,
        most: int,
        drafts: np.ndarray,
        counts: np.ndarray,
    ) -> int:
        width = drafts.shape[1]
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            text = table[row, :length]
            found = self._predicted(row, text, width)
            if not found:
                matches = places(text[:-1], text, most)
                longest = max(matches.values(), default=0)
                if longest >= self._least:
                    end = max(end for end, count in matches.items() if count == longest)
                    found = copied(Place(text[end:].tolist(), longest, True), width)
            counts[row] = len(found)
            drafts[row, : len(found)] = found
        return int((counts[rows] > 0).sum())

    def find_likely(
        self,
        table: np.ndarray,
        rows: np.ndarray,
        lengths: np.ndarray,
        depth: int,
        factor: float,
        least: float,
        drafts: np.ndarray,
        counts: np.ndarray,
    ) -> int:
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            text, corpus = table[row, :length], self._corpora[row]
            found = self._predicted(row, text, drafts.shape[1])
            if not found:
                voting = latest_places(text, text, depth, MOST_PLACES, is_own=True)
                others: list[Place] = []
                for half in () if corpus is None else corpus.halves:
                    others += latest_places(half, text, depth, MOST_PLACES - len(others), is_own=False)
                voting += others
                voting.sort(key=lambda place: -place.matched)
                found = likeliest(voting, depth, factor, least, drafts.shape[1])
            counts[row] = len(found)
            drafts[row, : len(found)] = found
        return int((counts[rows] > 0).sum())

    def _predicted(self, row: int, text: np.ndarray, width: int) -> list[int]:
        prediction = self._predictions[row]
        matches = {end: count for end, count in places(prediction[:-1], text, PREDICTED_MATCH).items() if count >= 2}
        if not matches:
            return []
        longest = max(matches.values())
        ends = sorted(end for end, count in matches.items() if count == longest)
        self._places[row] = end = next((end for end in ends if end >= self._places[row]), ends[-1])
        found: list[int] = prediction[end : end + width].tolist()
        return found


def places(text: np.ndarray, tail: np.ndarray, most: int) -> dict[int, int]:
    """End of each occurrence of `tail`'s last token in `text` -> number of matching tokens before it, at most
    `most`."""
    found = {}
    for end in (np.flatnonzero(text == tail[-1]) + 1).tolist():
        limit, count = min(most, end, len(tail)), 1
        while count < limit and text[end - 1 - count] == tail[-1 - count]:
            count += 1
        found[end] = count
    return found


def latest_places(text: np.ndarray, tail: np.ndarray, depth: int, most: int, *, is_own: bool) -> list[Place]:
    """At most `most` voting places of a text: longer matches first, then later ones."""
    matches, found, above = places(text[:-1], tail, depth), [], depth + 1
    for least in RUNS[::-1]:
        if least <= min(len(tail), depth):
            found += [end for end in sorted(matches, reverse=True) if least <= matches[end] < above]
            above = least
    return [Place(text[end:].tolist(), matches[end], is_own) for end in found[:most]]


def copied(place: Place, width: int) -> list[int]:
    """Next `width` tokens after a place in the sequence's own text; past its end they repeat the copied ones. A draft
    of `method: ngram`."""
    path: list[int] = []
    while len(path) < width:
        path.append(place.token_at(path))
    return path


def likeliest(voting: list[Place], depth: int, factor: float, least: float, width: int) -> list[int]:
    """Draft of at most `width` tokens with the highest score (`method: suffix`). voting: places with longer matches
    first."""
    best, chosen = 0.0, []
    counts = sorted({place.matched for place in voting}, reverse=True)
    for number, most_matched in enumerate(counts):
        least_matched = counts[number + 1] + 1 if number + 1 < len(counts) else 1
        matched = range(least_matched, most_matched + 1)
        limit = max(0, *(min(width, depth - each, int(factor * each)) for each in matched))
        alive = [place for place in voting if place.matched >= most_matched]
        path: list[int] = []
        probability, score = 1.0, 0.0
        while len(path) < limit:
            tokens = [place.token_at(path) for place in alive]
            known = [token for token in tokens if token >= 0]
            if not known:
                break
            token = max(known, key=known.count)  # ties go to the first
            probability = probability * known.count(token) / len(known)
            if probability < least:
                break
            alive = [place for place, each in zip(alive, tokens, strict=True) if each == token]
            path.append(token)
            score += probability
        if score > best:
            best, chosen = score, path
    return chosen
