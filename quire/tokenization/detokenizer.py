"""Incremental detokenisation: the text that each new token adds, at a cost that does not grow with the text.

The increments of a sequence concatenate to `Tokenizer.decode` of all its tokens, whatever the tokens. (The one
exception: invalid UTF-8 under a decoder of the rare kind that only knows whole sequences.) A character whose bytes
come in several tokens is held back until it is complete; `flush` releases what is left as U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.tokenization.pieces import REPLACEMENT, BytePieces, LocalPieces, Pieces, WholePieces

PROMPT_TAIL = 16
"""Prompt tokens that a completion's text can depend on: an unfinished character spans at most four."""
MAX_HELD_TOKENS = 16
"""A whole-sequence decoder that shows no complete character after MAX_HELD_TOKENS tokens never will."""
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TokenStream(Protocol):
    """Decodes one sequence, token by token. Special tokens to leave out are never pushed."""

    def set_prompt(self, token_ids: Sequence[int]) -> None:
        """Take the end of the prompt, whose text is not shown. Called at most once, before anything is pushed."""
        ...

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        ...

    def flush(self) -> str:
        """What was held back. Nothing is pushed afterwards."""
        ...


class IncrementalDetokenizer:
    """The text of one completion as it grows.

    skipped: ids that have no text (the special tokens, or none). prompt_token_ids: what the completion continues;
    none of its text appears in the output, but the completion reads as in the middle of a text (a sentencepiece
    word keeps its leading space) and may complete a character that the prompt began.
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
        """Take new tokens; return the text that they complete."""
        skipped, push = self._skipped, self._push
        return "".join([push(token_id) for token_id in token_ids if token_id not in skipped])

    def push(self, token_id: int) -> str:
        """As `append`, for one token."""
        return "" if token_id in self._skipped else self._push(token_id)

    def flush(self) -> str:
        """The text still held back. The sequence has ended."""
        return self._stream.flush()


def decode_tokens(pieces: Pieces, token_ids: Iterable[int], skipped: frozenset[int] = frozenset()) -> str:
    """Text of a whole sequence, as its increments concatenate."""
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
    """Byte-level tokens through an incremental UTF-8 decoder."""

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
    """Tokens that are text or single bytes. Each byte that belongs to no character becomes one U+FFFD."""

    __slots__ = ("_first", "_held", "_pieces", "_strip_char", "_strip_count")

    def __init__(self, pieces: LocalPieces) -> None:
        self._pieces = pieces
        self._first = True
        self._held = bytearray()
        """Bytes of one incomplete character."""
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
                # The held bytes cannot become a character: give them up, and look at what is left afresh.
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
    """For decoders that only know whole sequences: decode a window of recent tokens, and what it adds to the text of
    the tokens already shown. The window starts one shown chunk back, so that the new text has its neighbours."""

    __slots__ = ("_num_shown", "_pieces", "_shown", "_window")

    def __init__(self, pieces: WholePieces) -> None:
        self._pieces = pieces
        self._window: list[int] = []
        self._num_shown = 0
        """Tokens at the start of the window whose text was returned already, ..."""
        self._shown = ""
        """... and their text."""

    def set_prompt(self, token_ids: Sequence[int]) -> None:
        self._window = list(token_ids)
        self._num_shown = len(self._window)
        # An unfinished character at the prompt's end is left to be shown when the completion completes it.
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
