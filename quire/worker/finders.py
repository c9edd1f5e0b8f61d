"""Finders of drafts in texts on a CPU: the sequence's own, outputs of earlier requests of its client, and what the
request expects (its prediction).

`method: ngram`: the longest run of a sequence's last tokens (`lookup_min` to `lookup_max` of them) that occurs before,
at its latest place; the drafts are the tokens behind that place, and behind the sequence's own end the drafts
themselves.

`method: suffix`: of the sequence's own text, and of the others, the latest `MOST_PLACES` places vote at which the last
two tokens or more occur, those of longer runs first. For each length of a match, the places that match as much propose
a path: the token that most of them have next, then the one that most of those have, and so on. A token's probability is
the product of these shares. The path ends before a probability of less than `least`, behind `factor` tokens for each
matched one, and where match and path are `depth` tokens. The drafts are the path with the highest sum of probabilities.

A prediction comes first: its place with the longest match, of several the next one behind the last.

`PlainTexts` and `PlainCorpus` define the native `DraftTexts` and `Corpus`, which enter each token in an index once and
look at the latest 512 places of a run's hash at most, so that no text makes a look-up long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.config.speculation import SpeculationConfig
from quire.registry import load_target

RUNS = (2, 4)
"""Lengths of the runs by which places are looked for, but those of `method: ngram`."""
MOST_PLACES = 4
PREDICTED_MATCH = 64
MOST_LENGTHS = 4
"""Most lengths of runs of one index."""
CORPUS_TOKENS = 2**20
"""Tokens of ended outputs of one scope, at most; the older half is dropped when they are more."""
CORPORA_BYTES = 64 * 2**20
"""Bytes of those of all scopes, beyond which the scope that was used least recently is dropped."""
NO_TOKENS = np.zeros(0, np.int32)


class Finder(Protocol):
    """Finds the drafts of request slots."""

    def begin_text(self, row: int, num_tokens: int, scope: str, prediction: Sequence[int]) -> None:
        """A row gets a sequence of `num_tokens`. scope: only requests of equal scopes may draw on one another's texts.
        prediction: tokens that the request expects."""
        ...

    def copy_text(self, source: int, destination: int, num_tokens: int) -> None:
        """A row becomes a copy of another one with its first tokens."""
        ...

    def rewrite(self, row: int, position: int) -> None:
        """The row's tokens from `position` on have changed."""
        ...

    def end_text(self, row: int, token_ids: np.ndarray) -> None:
        """The row's sequence gives up its slot. token_ids: all its tokens, int32."""
        ...

    def find_drafts(
        self, table: np.ndarray, rows: np.ndarray, lengths: np.ndarray, drafts: np.ndarray, counts: np.ndarray
    ) -> int:
        """Fill drafts, [num_rows, most drafts] int32, and counts, [num_rows] int64, of rows, [R] int64, that have
        `lengths` tokens in the token table, [num_rows, capacity] int32; return how many of them have any."""
        ...


class NoFinder:
    """Nothing follows what becomes of rows."""

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
    """Outputs that have ended."""

    @property
    def num_bytes(self) -> int: ...

    def add(self, text: np.ndarray) -> None: ...


class MakeCorpus(Protocol):
    def __call__(self, max_tokens: int, max_texts: int) -> Corpus: ...


class Texts(Protocol):
    """The texts of request slots. Each call of a row's begins with `begin`."""

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
        """By `method: ngram`. Runs have the index's least length at least, `most` tokens at most."""
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
        """By `method: suffix`."""
        ...


class MakeTexts(Protocol):
    def __call__(self, num_rows: int, lengths: list[int]) -> Texts: ...


class TextFinder:
    """Implements Finder for `method: ngram` and `suffix`."""

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
        """Tokens of each row that are no output of its slot, its scope, and its prediction."""

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
        """Keep the output of the slot, with some tokens before it by which it is found."""
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
    """The outputs that have ended, by scope. Which scopes are dropped depends on the order of requests alone: all ranks
    drop the same."""

    def __init__(self, make_corpus: MakeCorpus, max_texts: int, max_bytes: int = CORPORA_BYTES) -> None:
        """max_texts: of each scope; 0: nothing is kept."""
        self.max_texts = max_texts
        self._make_corpus = make_corpus
        self._max_bytes = max_bytes
        self._corpora: dict[str, Corpus] = {}
        """The one that was used last comes last."""
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
        """Count the bytes of a scope, and drop others where there are too many."""
        num_bytes = max(corpus.num_bytes, 1024)
        self._total += num_bytes - self._num_bytes.get(scope, 0)
        self._num_bytes[scope] = num_bytes
        while self._total > self._max_bytes and len(self._corpora) > 1:
            oldest = next(iter(self._corpora))
            del self._corpora[oldest]
            self._total -= self._num_bytes.pop(oldest)


class CustomFinder(NoFinder):
    """Implements Finder by an object of the operator's (`method: custom_class`), which sees tokens alone.

    The class is called with the most drafts of a step, and has `propose(token_ids)`: the tokens of a sequence, [length]
    int32, read-only, -> guesses of the next ones. Guesses beyond the most are left out, and so are those from the first
    on that is no token of the model.
    """

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
    """The lengths of runs by which places are looked for: few of those from `least` to `most`, both among them."""
    count = min(MOST_LENGTHS, most - least + 1)
    if count == 1:
        return [least]
    return [least + number * (most - least) // (count - 1) for number in range(count)]
