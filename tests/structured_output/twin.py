"""A matcher in this process, on llguidance alone: what the masks of the engine are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from quire.decoding.masks import ConstraintSpec


class Twin:
    """Follows one token at a time. Tokens that alone may follow are found once, and expected one after the other."""

    def __init__(self, vocabulary: LLTokenizer, text: str, vocab_size: int, spec: ConstraintSpec) -> None:
        self._state = LLMatcher(vocabulary, text, log_level=0)
        self._vocab_size = vocab_size
        self._ends = [token for token in vocabulary.eos_tokens if token < vocab_size]
        self._spec = spec
        self._has_begun = not spec.start_after
        self._tokens: list[int] = []
        self._certain: list[int] = []
        self.is_finished = self.ends_in_text = False
        self._look()

    def follow(self, token_id: int) -> bool:
        if not self._has_begun:
            self._tokens.append(token_id)
            self._has_begun = self._tokens[-len(self._spec.start_after) :] == list(self._spec.start_after)
            self._look()
            return True
        if self.is_finished or not self._state.consume_token(token_id):
            return False
        if self._state.is_stopped():
            self.is_finished, self.ends_in_text = True, self._state.stop_reason() != "EndOfSentence"
        self._certain = self._certain[1:] if self._certain[:1] == [token_id] else []
        self._look()
        return True

    @property
    def certain(self) -> list[int]:
        return self._certain

    def allowed(self) -> set[int] | None:
        """The tokens that may come next. None: all."""
        if not self._has_begun:
            return None
        if self._certain:
            found = {self._certain[0]}
        else:
            bits = np.unpackbits(np.frombuffer(self._state.compute_bitmask(), np.uint8), bitorder="little")
            found = set(np.flatnonzero(bits[: self._vocab_size]).tolist())
        if self._spec.ignore_eos:
            found = found - set(self._ends) or found
        return found

    def _look(self) -> None:
        if self._has_begun and not self.is_finished and not self._certain:
            self._certain = self._state.compute_ff_tokens()


def tokens_of(mask: bytes | None) -> set[int] | None:
    """The tokens of a mask."""
    if mask is None:
        return None
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


def follow_all(twin: Twin, token_ids: Sequence[int]) -> int:
    """Follow tokens up to the first one that is not allowed; returns their number."""
    for number, token_id in enumerate(token_ids):
        if not twin.follow(token_id):
            return number
    return len(token_ids)
