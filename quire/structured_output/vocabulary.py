"""Model's tokens for llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.errors import UserError
from quire.tokenization.pieces import WholePieces
from quire.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

FIRST_TEXTS = ("", "\n")
"""Texts put before a text, in turn, until its tokens have exactly its bytes."""


class Vocabulary:
    """Tokenizer as `llguidance.LLTokenizer` expects it. `tokens`: bytes by token id, empty for ids that no text may
    use."""

    is_tokenizer_wrapper = True

    def __init__(
        self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_ids: Sequence[int], tokenizer: Tokenizer
    ) -> None:
        """eos_ids: end-of-sequence tokens, at least one."""
        self.tokens = tokens
        self.special_token_ids = list(special_ids)
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        self._tokenizer = tokenizer
        self._ids: dict[bytes, int] = {}
        self._longest = 0

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else bytes(text)
        return self._tokenise(data) or self._longest_match(data)

    def _tokenise(self, data: bytes) -> list[int]:
        """Text of llguidance as tokens with exactly these bytes; empty if none."""
        text = data.decode(errors="replace")
        for first in FIRST_TEXTS:
            ids = self._tokenizer.encode(first + text, add_special_tokens=False)
            if any(token_id >= len(self.tokens) for token_id in ids):
                continue
            pieces = [self.tokens[token_id] for token_id in ids]
            rest = len(data)
            for start in range(len(ids) - 1, -1, -1):
                rest -= len(pieces[start])
                if rest <= 0:
                    break
            if rest == 0 and b"".join(pieces[start:]) == data:
                return ids[start:]
        return []

    def _longest_match(self, data: bytes) -> list[int]:
        """Tokens by repeated longest match, up to bytes without a token."""
        if not self._ids:
            special = set(self.special_token_ids)
            self._ids = {piece: number for number, piece in enumerate(self.tokens) if piece and number not in special}
            self._longest = max(map(len, self._ids), default=0)
        found, start = [], 0
        while start < len(data):
            sizes = range(min(self._longest, len(data) - start), 0, -1)
            size = next((size for size in sizes if data[start : start + size] in self._ids), 0)
            if not size:
                break
            found.append(self._ids[data[start : start + size]])
            start += size
        return found


def check_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer itself. Raises UserError for a model whose tokens have no text of their own."""
    if tokenizer is None:
        raise UserError("structured outputs need a tokenizer, and this model has none", param="structured_outputs")
    if isinstance(tokenizer.pieces, WholePieces):
        raise UserError(
            "structured outputs are not supported with this tokenizer: the text of a token depends on its neighbours",
            param="structured_outputs",
        )
    return tokenizer


def make_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """All tokens of a model, for masks. vocab_size: may differ from the tokenizer's. eos_token_ids: tokens that end a
    text where the grammar allows it; none: an id after the vocabulary stands for them."""
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(min(vocab_size, tokenizer.vocab_size))]
    tokens += [b""] * (vocab_size - len(tokens))
    from llguidance import LLTokenizer  # only where a request asks for it: it takes a tenth of a second

    eos = [token_id for token_id in eos_token_ids if token_id < len(tokens)]
    if not eos:
        eos, tokens = [len(tokens)], [*tokens, b"<|end of text|>"]
    special = sorted({token_id for token_id in (*tokenizer.special_ids, *eos) if token_id < len(tokens)})
    vocabulary = Vocabulary(tokens, special, eos, tokenizer)
    return LLTokenizer(vocabulary, n_vocab=len(tokens), eos_token=eos)  # type: ignore[arg-type]
