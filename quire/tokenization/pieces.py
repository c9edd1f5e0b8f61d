"""Text of single tokens: the decoder's output for a token in the middle of a text. Kinds of decoder: byte level (GPT-2,
OPT, LLaMA 3, Qwen), local (sentencepiece-like, WordPiece, none; only a text's first token may differ), any other (only
whole sequences can be decoded).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

LOCAL_STEPS = frozenset({"Replace", "Strip", "Metaspace", "WordPiece"})
"""Decoder steps that treat each token alone, except perhaps the first."""
POSITION_STEPS = frozenset({"Metaspace", "WordPiece"})
ANCHOR = "a"
"""Token that local decoders leave unchanged: a token after it is decoded as in the middle of a text."""
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
REPLACEMENT = "\ufffd"


class BytePieces:
    """Byte-level decoding. `of` returns a token's bytes; empty for unknown ids."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        self._byte_of = _byte_alphabet()

    def of(self, token_id: int) -> bytes:
        piece = self._bytes.get(token_id)
        if piece is None:
            piece = self._bytes[token_id] = self._compute(token_id)
        return piece

    def _compute(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        try:
            return bytes([self._byte_of[char] for char in token])
        except KeyError:  # an added token is plain text, not bytes in disguise
            return token.encode()

    def token_bytes(self, token_id: int) -> bytes:
        return self.of(token_id)

    def token_text(self, token_id: int) -> str:
        return self.of(token_id).decode(errors="replace")


class LocalPieces:
    """Token-by-token decoding. `of` returns a token's text inside a text, or the byte of a byte token.

    left_strip: (character, maximum count) to remove from the text's start.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, byte_fallback: bool, left_strip: tuple[str, int]) -> None:
        self._backend = backend
        self._byte_fallback = byte_fallback
        self._pieces: dict[int, str | int] = {}
        decoder = backend.decoder
        self._decode: Callable[[list[str]], str] = " ".join if decoder is None else decoder.decode
        self._anchor_length = len(self._decode([ANCHOR]))
        self.left_strip = left_strip

    def of(self, token_id: int) -> str | int:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._compute(token_id)
        return piece

    def first(self, token_id: int) -> str | int:
        """Text of a text's first token, without applying `left_strip`."""
        piece = self.of(token_id)
        if isinstance(piece, int) or self.left_strip[1]:
            return piece
        token = self._backend.id_to_token(token_id)
        return "" if token is None else self._decode([token])

    def knows(self, token_id: int) -> bool:
        return self._backend.id_to_token(token_id) is not None

    def _compute(self, token_id: int) -> str | int:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return ""
        if self._byte_fallback and BYTE_TOKEN.fullmatch(token):
            return int(token[3:5], 16)
        return self._decode([ANCHOR, token])[self._anchor_length :]

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.of(token_id)
        return bytes([piece]) if isinstance(piece, int) else piece.encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


class WholePieces:
    """Texts of tokens for a decoder whose output for a token depends on its neighbours."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])


Pieces = BytePieces | LocalPieces | WholePieces


def compile_pieces(backend: tokenizers.Tokenizer) -> Pieces:
    """Find the kind of the tokenizer's decoder. The tokenizer must not change afterwards."""
    if backend.decoder is None:
        return LocalPieces(backend, byte_fallback=False, left_strip=("", 0))
    steps = _steps(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return BytePieces(backend)
    left_strip = ("", 0)
    if kinds[-2:] == ["Fuse", "Strip"] and steps[-1]["stop"] == 0 and not POSITION_STEPS & set(kinds):
        left_strip = (steps[-1]["content"], steps[-1]["start"])
        kinds = kinds[:-2]
    elif kinds[-1:] == ["Fuse"]:
        kinds = kinds[:-1]
    byte_fallback = kinds[-1:] == ["ByteFallback"]
    if set(kinds[:-1] if byte_fallback else kinds) <= LOCAL_STEPS:
        return LocalPieces(backend, byte_fallback=byte_fallback, left_strip=left_strip)
    return WholePieces(backend)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _byte_alphabet() -> dict[str, int]:
    """Character of each byte in byte-level vocabularies: printable bytes stand for themselves, others are numbered from
    U+0100."""
    alphabet = ByteLevel.alphabet()
    printable = {char: ord(char) for char in alphabet if ord(char) < 256}
    others = sorted(set(range(256)) - set(printable.values()))
    return printable | {chr(256 + number): byte for number, byte in enumerate(others)}
