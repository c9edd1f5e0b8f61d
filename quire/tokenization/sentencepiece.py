"""Sentencepiece tokenizers, from `tokenizer.model` or a GGUF file.

Kinds: BPE (LLaMA 2, Gemma; piece_merges.py); Unigram (T5) takes the pieces with the highest sum of scores.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers

from quire.errors import ModelLoadError
from quire.tokenization.charsmap import Charsmap
from quire.tokenization.piece_merges import PieceMerger, any_of
from quire.tokenization.vocabulary_limits import LONGEST_PIECE, check_pieces

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BPE, UNIGRAM = 2, 1
"""Kinds of models, numbered as in TrainerSpec.model_type."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Character for a space in pieces."""
MAX_PIECES = 2**21


@dataclass(frozen=True)
class SentencePieces:
    """Model of sentencepiece. pieces, scores, kinds: by id. model: BPE or UNIGRAM. charsmap: compiled character table,
    or empty. adds_space: put a space before a text. joins_spaces: join runs of spaces and strip the ends."""

    pieces: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    model: int = BPE
    charsmap: bytes = b""
    adds_space: bool = True
    joins_spaces: bool = False


def sentencepiece_backend(model: SentencePieces) -> tokenizers.Tokenizer:
    """Pipeline from the words of `TextPreparation` to ids, and from ids to text. Raises ModelLoadError for a
    contradictory model, and any exception of the library."""
    pieces, kinds = model.pieces, model.kinds
    if not len(pieces) == len(model.scores) == len(kinds) <= MAX_PIECES:
        raise ModelLoadError(f"{len(pieces)} pieces, {len(model.scores)} scores and {len(kinds)} kinds")
    check_pieces("the vocabulary", pieces)
    backend = tokenizers.Tokenizer(_bpe(model) if model.model == BPE else _unigram(model))
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.adds_space:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    added = {CONTROL: True, UNKNOWN: True} | ({USER_DEFINED: False} if model.model == BPE else {})
    for kind, special in added.items():
        texts = [piece for piece, own in zip(pieces, kinds, strict=True) if own == kind and piece]
        backend.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False) for text in texts])
    return backend


def special_pieces(model: SentencePieces) -> dict[str, str]:
    """Special pieces by their usual names in tokenizer_config.json."""
    usual = {"<s>": "bos_token", "<bos>": "bos_token", "</s>": "eos_token", "<eos>": "eos_token", "<pad>": "pad_token"}
    kinds = zip(model.pieces, model.kinds, strict=True)
    return {usual[piece]: piece for piece, kind in kinds if kind == CONTROL and piece in usual}


def _vocabulary(model: SentencePieces) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for piece_id, piece in enumerate(model.pieces):
        if piece in vocabulary:
            raise ModelLoadError(
                f"the piece {piece[:LONGEST_PIECE]!r} is there twice, as {vocabulary[piece]} and {piece_id}"
            )
        vocabulary[piece] = piece_id
    return vocabulary


def _bpe(model: SentencePieces) -> models.BPE:
    return models.BPE(
        vocab=_vocabulary(model),
        merges=[],
        unk_token=_unknown(model),
        fuse_unk=True,
        byte_fallback=BYTE in model.kinds,
        ignore_merges=True,
    )


def _unigram(model: SentencePieces) -> models.Unigram:
    _vocabulary(model)
    unknown = _unknown(model)
    best = max([0.0, *(score for score, kind in zip(model.scores, model.kinds, strict=True) if kind == NORMAL)])
    scored = []
    for piece, score, kind in zip(model.pieces, model.scores, model.kinds, strict=True):
        # A user-defined piece scores higher than every other segmentation of its text.
        scored.append((piece, len(piece.encode()) * best - 0.1 if kind == USER_DEFINED else score))
    unknown_id = None if unknown is None else list(model.pieces).index(unknown)
    return models.Unigram(scored, unk_id=unknown_id, byte_fallback=BYTE in model.kinds)


def _unknown(model: SentencePieces) -> str | None:
    found = (piece for piece, kind in zip(model.pieces, model.kinds, strict=True) if kind == UNKNOWN)
    return next(found, None)


class TextPreparation:
    """Steps before the library: character table, spaces, a space before the text and, for BPE, pieces. Special tokens
    stay; each text between them counts as a text of its own, as in llama.cpp."""

    def __init__(self, model: SentencePieces, special: Collection[str]) -> None:
        steps: list[normalizers.Normalizer] = []
        self._charsmap = Charsmap(model.charsmap) if model.charsmap else None
        if model.joins_spaces:
            steps += [normalizers.Replace(Regex(ends), "") for ends in (r"\A +", r" +\z")]
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        self._normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
        self._start = SPACE if model.adds_space else ""
        self._special = any_of(special)
        # The character table leaves user-defined pieces as they are.
        own = [piece for piece, kind in zip(model.pieces, model.kinds, strict=True) if kind == USER_DEFINED and piece]
        self._user_defined = any_of(own) if model.charsmap else None
        self._cut: Callable[[str], list[str]] = _merger(model, [*special, *own]) if model.model == BPE else _whole

    def __call__(self, text: str) -> list[str]:
        return self._cut(_between(self._special, text, self._normalized))

    def _normalized(self, text: str) -> str:
        mapped = text if self._charsmap is None else _between(self._user_defined, text, self._charsmap)
        normal: str = self._normalizer.normalize_str(mapped)
        return self._start + normal if normal else ""


def _merger(model: SentencePieces, whole: Collection[str]) -> PieceMerger:
    of_kind = {
        kind: {
            piece: score
            for piece, score, own in zip(model.pieces, model.scores, model.kinds, strict=True)
            if own == kind and piece
        }
        for kind in (NORMAL, UNUSED)
    }
    return PieceMerger(of_kind[NORMAL] | of_kind[UNUSED], of_kind[UNUSED], whole, SPACE)


def _whole(text: str) -> list[str]:
    return [text] if text else []


def _between(pattern: re.Pattern[str] | None, text: str, change: Callable[[str], str]) -> str:
    parts = [text] if pattern is None else pattern.split(text)
    parts[::2] = [change(part) for part in parts[::2]]
    return "".join(parts)


def read_sentencepiece(content: bytes, file: Path) -> SentencePieces:
    """Read a `tokenizer.model` (sentencepiece's protocol buffer ModelProto). Raises ModelLoadError."""
    pieces: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer: dict[int, bytes | int] = {}
    normalizer: dict[int, bytes | int] = {}
    try:
        for number, value in _fields(content):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                text, score = piece.get(1, b""), piece.get(2, bytes(4))
                if not isinstance(text, bytes) or not isinstance(score, bytes):
                    raise ValueError("a piece without text or score")
                pieces.append(text.decode())
                scores.append(struct.unpack("<f", score)[0])
                kinds.append(int(piece.get(3, NORMAL)))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(_fields(value))
    except (ValueError, IndexError, struct.error) as error:
        raise ModelLoadError(f"{file} is not a sentencepiece model: {error}") from None
    kind = trainer.get(3, UNIGRAM)
    if not pieces or kind not in (BPE, UNIGRAM):
        raise ModelLoadError(
            f"{file}: {len(pieces)} pieces and model type {kind!r}; BPE and Unigram models are supported"
        )
    if trainer.get(24, 0) or not normalizer.get(5, 1):
        raise ModelLoadError(f"{file}: spaces behind words, and spaces that are not escaped, are not supported")
    charsmap = normalizer.get(2, b"")
    return SentencePieces(
        pieces,
        scores,
        kinds,
        model=int(kind),
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        adds_space=bool(normalizer.get(3, 1)),
        joins_spaces=bool(normalizer.get(4, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"a field of the wire type {kind}")
        length = {1: 8, 5: 4}.get(kind, 0)
        if kind == 2:
            length, position = _varint(data, position)
        if length > len(data) - position:
            raise ValueError("a field reaches beyond the end")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        byte = data[position + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, position + place + 1
    raise ValueError("a number of more than ten bytes")
