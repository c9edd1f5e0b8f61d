"""Finders of drafts on a CPU: in the sequence's text, earlier outputs for its client, and the request's prediction.
`method: ngram` copies what follows the latest earlier occurrence of the longest run of last tokens; for `suffix`
`MOST_PLACES` places vote. A prediction comes first (docs/decisions/0102-drafts.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.config.speculation import SpeculationConfig
from quire.registry import load_target

RUNS = (2, 4)
"""Lengths of the runs by which places are indexed, except for `method: ngram`."""
MOST_PLACES = 4
PREDICTED_MATCH = 64
MOST_LENGTHS = 4
"""Maximum run lengths in one index."""
CORPUS_TOKENS = 2**20
"""Maximum tokens of ended outputs per scope; beyond it the older half is dropped."""
CORPORA_BYTES = 64 * 2**20
"""Maximum bytes over all scopes; beyond it the least recently used scope is dropped."""
NO_TOKENS = np.zeros(0, np.int32)


class Finder(Protocol):
    """Finds drafts for request slots in earlier text; a drafter asks it before each step."""

    def begin_text(self, row: int, num_tokens: int, scope: str, prediction: Sequence[int]) -> None:
        """Start a sequence of `num_tokens` in a row. scope: only requests of equal scopes share texts. prediction:
        tokens that the request expects."""
        ...

    def copy_text(self, source: int, destination: int, num_tokens: int) -> None:
        """Start a forked row with another's first `num_tokens` tokens."""
        ...

    def rewrite(self, row: int, position: int) -> None:
        """Note that the row's tokens from `position` on have changed."""
        ...

    def end_text(self, row: int, token_ids: np.ndarray) -> None:
        """End the row's sequence. token_ids: all its tokens, int32."""
        ...

    def find_drafts(
        self, table: np.ndarray, rows: np.ndarray, lengths: np.ndarray, drafts: np.ndarray, counts: np.ndarray
    ) -> int:
        """Fill drafts, [num_rows, max drafts] int32, and counts, [num_rows] int64, for `rows`, [R] int64, with
        `lengths` tokens in the token table, [num_rows, capacity] int32. Returns the number of rows with drafts."""
        ...


class NoFinder:
    """Finder that finds nothing. For heads, models or oracles."""

    def begin_text(self, row: int, num_tokens: int, scope: str, prediction: Sequence[int]) -> None: ...

    def copy_text(self, source: int, destination: int, num_tokens: int) -> None: ...

    def rewrite(self, row: int, position: int) -> None: ...

    def end_text(self, row: int, token_ids: np.ndarray) -> None: ...

    def find_drafts(
        self, table: np.ndarray, rows: np.ndarray, lengths: np.ndarray, drafts: np.ndarray, counts: np.ndarray
    ) -> int:
        return 0


NO_FINDER = NoFinder()


class Corpus(Protocol):
    """Index of the ended outputs of one scope (LoRA, tenant), to look drafts up in."""

    @property
    def num_bytes(self) -> int: ...

    def add(self, text: np.ndarray) -> None: ...


class MakeCorpus(Protocol):
    def __call__(self, max_tokens: int, max_texts: int) -> Corpus: ...


class Texts(Protocol):
    """Running sequences' texts by request slot, indexed for look-ups; `begin` precedes other calls for a row."""

    def begin(self, row: int, corpus: Corpus | None, prediction: np.ndarray) -> None: ...

    def rewrite(self, row: int, position: int) -> None: ...

    def find_runs(
        self,
        table: np.ndarray,
        rows: np.ndarray,
        lengths: np.ndarray,
        most: int,
        drafts: np.ndarray,
        counts: np.ndarray,
    ) -> int:
        """Look up by `method: ngram`, matching from the index's least length to `most` last tokens."""
        ...

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
        """Look up by `method: suffix`: the likeliest tokens after the longest matches. Writes `drafts` and `counts`, as
        `find_runs`."""
        ...


class MakeTexts(Protocol):
    def __call__(self, num_rows: int, lengths: list[int]) -> Texts: ...


class TextFinder:
    def __init__(
        self, num_rows: int, config: SpeculationConfig, make_texts: MakeTexts, make_corpus: MakeCorpus
    ) -> None:
        self._config = config
        suffix = config.suffix
        lengths = run_lengths(config.lookup_min, config.lookup_max) if suffix is None else list(RUNS)
        self._texts = make_texts(num_rows, lengths)
        max_texts = 0 if suffix is None else suffix.max_texts
        self._corpora = Corpora(make_corpus, max_texts)
        self._rows: list[tuple[int, str, np.ndarray]] = [(0, "", NO_TOKENS)] * num_rows
        """Each row's number of tokens that are not its output, its scope and its prediction."""

    def begin_text(self, row: int, num_tokens: int, scope: str, prediction: Sequence[int]) -> None:
        self._begin(row, num_tokens, scope, np.array(prediction, np.int32))

    def _begin(self, row: int, num_tokens: int, scope: str, prediction: np.ndarray) -> None:
        self._rows[row] = num_tokens, scope, prediction
        self._texts.begin(row, self._corpora.of(scope), prediction)

    def copy_text(self, source: int, destination: int, num_tokens: int) -> None:
        _, scope, prediction = self._rows[source]
        self._begin(destination, num_tokens, scope, prediction)

    def rewrite(self, row: int, position: int) -> None:
        self._texts.rewrite(row, position)

    def end_text(self, row: int, token_ids: np.ndarray) -> None:
        """Keep the slot's output, with some tokens before it for matching."""
        first, scope, _ = self._rows[row]
        if self._corpora.max_texts and len(token_ids) > first:
            assert self._config.suffix is not None, "only this method keeps texts"
            self._corpora.add_output(scope, token_ids[max(0, first - self._config.suffix.depth) :])
        self._texts.begin(row, None, NO_TOKENS)

    def find_drafts(
        self, table: np.ndarray, rows: np.ndarray, lengths: np.ndarray, drafts: np.ndarray, counts: np.ndarray
    ) -> int:
        suffix = self._config.suffix
        if suffix is None:
            return self._texts.find_runs(table, rows, lengths, self._config.lookup_max, drafts, counts)
        rule = suffix.depth, suffix.factor, suffix.least
        return self._texts.find_likely(table, rows, lengths, *rule, drafts, counts)


class Corpora:
    """Ended outputs by scope. Eviction depends only on the order of requests, so all ranks evict the same."""

    def __init__(self, make_corpus: MakeCorpus, max_texts: int, max_bytes: int = CORPORA_BYTES) -> None:
        """max_texts: limit of texts per scope; 0: keep nothing. max_bytes: limit of all texts."""
        self.max_texts = max_texts
        self._make_corpus = make_corpus
        self._max_bytes = max_bytes
        self._corpora: dict[str, Corpus] = {}
        self._num_bytes: dict[str, int] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._corpora)

    def of(self, scope: str) -> Corpus | None:
        if not self.max_texts:
            return None
        corpus = self._corpora.pop(scope, None) or self._make_corpus(CORPUS_TOKENS, self.max_texts)
        self._corpora[scope] = corpus
        self._account(scope, corpus)
        return corpus

    def add_output(self, scope: str, text: np.ndarray) -> None:
        corpus = self.of(scope)
        assert corpus is not None, "texts are kept"
        corpus.add(text)
        self._account(scope, corpus)

    def _account(self, scope: str, corpus: Corpus) -> None:
        num_bytes = max(corpus.num_bytes, 1024)
        self._total += num_bytes - self._num_bytes.get(scope, 0)
        self._num_bytes[scope] = num_bytes
        while self._total > self._max_bytes and len(self._corpora) > 1:
            oldest = next(iter(self._corpora))
            del self._corpora[oldest]
            self._total -= self._num_bytes.pop(oldest)


class CustomFinder(NoFinder):
    """Finder that calls a user's class (`method: custom_class`). It has `propose(token_ids)`: a sequence's tokens,
    [length] int32, read-only, -> guesses; invalid and surplus ones are dropped."""

    def __init__(self, name: str, max_drafts: int, vocab_size: int) -> None:
        self._drafter = load_target(name)(max_drafts)
        self._vocab_size = vocab_size

    def find_drafts(
        self, table: np.ndarray, rows: np.ndarray, lengths: np.ndarray, drafts: np.ndarray, counts: np.ndarray
    ) -> int:
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            tokens = table[row, :length]
            tokens.flags.writeable = False
            counts[row] = 0
            for token in list(self._drafter.propose(tokens))[: drafts.shape[1]]:
                if not 0 <= token < self._vocab_size:
                    break
                drafts[row, counts[row]] = token
                counts[row] += 1
        return int((counts[rows] > 0).sum())


def run_lengths(least: int, most: int) -> list[int]:
    """At most MOST_LENGTHS numbers of last tokens to match, from `least` to `most`, both included."""
    count = min(MOST_LENGTHS, most - least + 1)
    if count == 1:
        return [least]
    return [least + number * (most - least) // (count - 1) for number in range(count)]
