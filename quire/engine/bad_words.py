"""Conversion of banned words into banned token sequences, with limits."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from quire.errors import UserError
from quire.tokenization.tokenizer import Tokenizer, check_unicode

MAX_BAD_WORDS = 1_024
MAX_BAD_WORD_CHARACTERS = 16_384
"""Maximum characters in all words of a request."""
MAX_BAD_WORD_TOKENS = 8_192
"""Maximum tokens in all sequences of a request."""


class BadWordTokenizer:
    """Encodes `bad_words` as token sequences, for InputProcessor. Thread-safe. tokenizer: None if the model has none.
    vocab_size: token ids of the model."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._last: tuple[tuple[str, ...], list[list[int]]] = (), []

    def sequences(self, bad_words: Sequence[str]) -> list[list[int]]:
        """Token ids of each word at a text's start, and after a space if they differ. Words with tokens beyond
        `vocab_size` are left out. Raises UserError if a limit is exceeded."""
        if not bad_words:
            return []
        if self._tokenizer is None:
            raise UserError("bad_words need a tokenizer, and this model has none", param="bad_words")
        if len(bad_words) > MAX_BAD_WORDS:
            raise UserError(f"at most {MAX_BAD_WORDS} bad_words are allowed", param="bad_words")
        num_characters = sum(map(len, bad_words))
        if num_characters > MAX_BAD_WORD_CHARACTERS:
            raise UserError(
                f"bad_words must not exceed {MAX_BAD_WORD_CHARACTERS} characters together, and have {num_characters}",
                param="bad_words",
            )
        key = tuple(bad_words)
        with self._lock:
            if self._last[0] != key:
                self._last = key, self._tokenise(self._tokenizer, key)
            return self._last[1]

    def _tokenise(self, tokenizer: Tokenizer, bad_words: tuple[str, ...]) -> list[list[int]]:
        texts: list[str] = []
        for word in bad_words:
            check_unicode(word, param="bad_words")
            bare = word.lstrip()
            if not bare:
                raise UserError(f"bad_words must hold words, not {word!r}", param="bad_words")
            texts += (bare, f" {bare}")
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        sequences = []
        for alone, spaced in zip(encoded[::2], encoded[1::2], strict=True):
            sequences.append(alone)
            # A sequence of equal length begins with another token, the word with its space; a longer one is a space
            # token and the same word.
            if spaced and len(spaced) == len(alone) and spaced[0] != alone[0]:
                sequences.append(spaced)
        sequences = [sequence for sequence in sequences if sequence and max(sequence) < self._vocab_size]
        num_tokens = sum(map(len, sequences))
        if num_tokens > MAX_BAD_WORD_TOKENS:
            raise UserError(
                f"bad_words must not exceed {MAX_BAD_WORD_TOKENS} tokens together, and have {num_tokens} (each word as "
                "it is written at the start of a text, and after a space)",
                param="bad_words",
            )
        return sequences
