"""Front end's half of structured outputs, before service.py."""

from __future__ import annotations

import threading
from functools import cached_property

from quire.config.structured_outputs import StructuredOutputsConfig
from quire.structured_output.grammar import write_grammar
from quire.structured_output.recent_texts import RecentTexts
from quire.structured_output.vocabulary import check_tokenizer
from quire.structured_outputs_params import StructuredOutputsParams
from quire.tokenization.tokenizer import Tokenizer

MAX_KEPT = 256
MAX_KEPT_CHARACTERS = 2**22
"""Limits of the kept grammars and their sources."""


class GrammarWriter:
    """Writes constraints of arriving requests as grammars, and keeps the most recently used. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        """vocab_size: model's tokens, perhaps fewer than the tokenizer's."""
        self.config = StructuredOutputsConfig()
        """Settings for every constraint; engines set them before the first."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._kept: RecentTexts[str] = RecentTexts(lambda text, grammar: len(text) + len(grammar))

    def write(self, params: StructuredOutputsParams) -> str:
        """Grammar of a constraint. Raises as `write_grammar` and `check_tokenizer`."""
        check_tokenizer(self._tokenizer)
        params = self.config.apply(params)
        try:
            key = repr(params)  # tells all values apart that grammars differ by
        except RecursionError:  # nested too deeply, which writing says in words
            return write_grammar(params, self._special_tokens)
        if len(key) > MAX_KEPT_CHARACTERS // MAX_KEPT:
            return write_grammar(params, self._special_tokens)
        with self._lock:
            known = self._kept.get(key)
        if known is not None:
            return known
        grammar = write_grammar(params, self._special_tokens)
        with self._lock:
            self._kept.put(key, grammar, MAX_KEPT, MAX_KEPT_CHARACTERS)
        return grammar

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        tokenizer = check_tokenizer(self._tokenizer)
        return {tokenizer.token_text(each): each for each in tokenizer.special_ids if each < self._vocab_size}
