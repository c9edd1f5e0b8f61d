"""Incremental detokenization: the text that each new token adds, at constant cost.

The increments of a sequence join to `Tokenizer.decode` of its tokens (except invalid UTF-8 under a rare decoder of
whole sequences). Bytes of an incomplete character are held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.tokenization.pieces import REPLACEMENT, BytePieces, LocalPieces, Pieces, WholePieces

PROMPT_TAIL = 16
"""Prompt tokens that can affect a completion's text."""
MAX_HELD_TOKENS = 16
"""Tokens after which an incomplete character is shown anyway."""
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TokenStream(Protocol):
    """Token-by-token decoder of one sequence. Skipped special tokens are not pushed."""

    def set_prompt(self, token_ids: Sequence[int]) -> None:
        """Set the prompt's end, whose text is not shown. Call at most once, first."""
        ...

    def push(self, token_id: int) -> str:
        """Text that this token completes."""
        ...

    def flush(self) -> str:
        """Text held back; ends the sequence."""
        ...


class IncrementalDetokenizer:
    """Decoder of one growing completion.

    skipped: token ids without text (special tokens, or none). prompt_token_ids: prompt of the completion. Its text is
    not returned, but the completion reads as its continuation.
    """

    __slots__ = ("_push", "_skipped", "_stream")

    def __init__(
        self, pieces: Pieces, skipped: frozenset[int] = frozenset(), prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._stream = _open_stream(pieces)
        self._push = self._stream.push
        self._skipped = skipped
        if prompt_token_ids:
            self._stream.set_prompt(
                [token_id for token_id in prompt_token_ids[-PROMPT_TAIL:] if token_id not in skipped]
            )

    def append(self, token_ids: Iterable[int]) -> str:
        """Decode new tokens; return the text that they complete."""
        skipped, push = self._skipped, self._push
        return "".join([push(token_id) for token_id in token_ids if token_id not in skipped])

    def push(self, token_id: int) -> str:
        """Decode one token; return the text that it completes."""
        return "" if token_id in self._skipped else self._push(token_id)

    def flush(self) -> str:
        return self._stream.flush()


def decode_tokens(pieces: Pieces, token_ids: Iterable[int], skipped: frozenset[int] = frozenset()) -> str:
    """Text of a whole sequence, equal to its joined increments."""
    detokenizer = IncrementalDetokenizer(pieces, skipped)
    return detokenizer.append(token_ids) + detokenizer.flush()


def _open_stream(pieces: Pieces) -> TokenStream:
    match pieces:
        case BytePieces():
            return ByteStream(pieces)
        case LocalPieces():
            return LocalStream(pieces)
        case WholePieces():
            return WindowStream(pieces)


class ByteStream:
    __slots__ = ("_decode", "_piece")

    def __init__(self, pieces: BytePieces) -> None:
        self._piece = pieces.of
        self._decode = _new_utf8_decoder("replace").decode

    def set_prompt(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        return self._decode(self._piece(token_id))

    def flush(self) -> str:
        return self._decode(b"", True)


class LocalStream:
    """Decoder of tokens that are text or single bytes. Each invalid byte becomes one U+FFFD."""

    __slots__ = ("_first", "_held", "_pieces", "_strip_char", "_strip_count")

    def __init__(self, pieces: LocalPieces) -> None:
        self._pieces = pieces
        self._first = True
        self._held = bytearray()
        self._strip_char, self._strip_count = pieces.left_strip

    def set_prompt(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        piece = self._pieces.first(token_id) if self._first else self._pieces.of(token_id)
        if isinstance(piece, int):
            self._first = False
            text = self._push_byte(piece)
        else:
            if self._first and self._pieces.knows(token_id):
                self._first = False
            if self._held and self._pieces.knows(token_id):
                piece = REPLACEMENT * len(self._held) + piece
                self._held.clear()
            text = piece
        return self._strip(text) if self._strip_count else text

    def flush(self) -> str:
        text = REPLACEMENT * len(self._held)
        self._held.clear()
        return text

    def _push_byte(self, byte: int) -> str:
        held = self._held
        held.append(byte)
        text = ""
        while held:
            try:
                text += held.decode()
                held.clear()
            except UnicodeDecodeError as error:
                if error.start == 0 and error.reason == "unexpected end of data":
                    break
                # The held bytes cannot become a character: replace them and decode the rest anew.
                text += REPLACEMENT * error.end
                del held[: error.end]
        return text

    def _strip(self, text: str) -> str:
        start = 0
        while self._strip_count and start < len(text):
            if text[start] == self._strip_char:
                start += 1
                self._strip_count -= 1
            else:
                self._strip_count = 0
        return text[start:]


class WindowStream:
    """Decoder for whole-sequence decoders: it decodes a window of recent tokens and returns what this adds."""

    __slots__ = ("_num_shown", "_pieces", "_shown", "_window")

    def __init__(self, pieces: WholePieces) -> None:
        self._pieces = pieces
        self._window: list[int] = []
        self._num_shown = 0
        """Number of tokens at the start of the window whose text was returned."""
        self._shown = ""

    def set_prompt(self, token_ids: Sequence[int]) -> None:
        self._window = list(token_ids)
        self._num_shown = len(self._window)
        # An unfinished character at the prompt's end is shown once the completion completes it.
        self._shown = self._pieces.decode(self._window).rstrip(REPLACEMENT)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._pieces.decode(self._window)
        num_held = len(self._window) - self._num_shown
        if text.endswith(REPLACEMENT) and num_held <= MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._pieces.decode(self._window))

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        if new:
            self._window = self._window[self._num_shown :]
            self._num_shown = len(self._window)
            self._shown = self._pieces.decode(self._window)
        return new
