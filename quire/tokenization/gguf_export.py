"""Export of a tokenizer to GGUF, the inverse of gguf.py: byte-level BPE with merges and its rule's name, a
sentencepiece model with scores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.errors import ModelLoadError
from quire.tokenization.gguf import SPECIAL_KEYS, SPLITTINGS
from quire.tokenization.sentencepiece import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieces,
    read_sentencepiece,
)
from quire.tokenization.tokenizer import MAX_SENTENCEPIECE_BYTES, SAMPLE, Tokenizer
from quire.utils.gguf_writer import Value
from quire.utils.model_files import file_bytes, read_model_file

WITHOUT = "--no-tokenizer writes the file without one"
SAMPLES = (
    SAMPLE,
    "Hello,  world!\n\n   3.14159 + 2,718 = ?\tIt's 10:45 o'clock; they'll be 12345678 km away.",
    "Größe und Ærø, naïve façade; Привет, мир; 你好，世界 — こんにちは 안녕하세요 🙂👍🏽 ½ ﬁ",
    "class A:\n    def f(self, x):\n        return {'a': [x ** 2, None]}  # ok\n",
)
"""Texts that must have the same ids after export."""
_END_KEYS = ("eot_token_id", "eom_token_id")
"""Keys of further tokens that end a text."""
_SENTENCEPIECE_FILE = "tokenizer.model"
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_LEAST_SCORE = -1e6


def describe_tokenizer(
    tokenizer: Tokenizer, directory: Path, vocab_size: int, end_ids: Sequence[int]
) -> dict[str, Value]:
    """GGUF metadata of a tokenizer, for `quire quantize`. vocab_size: rows of the embedding; missing ids are padded.
    end_ids: tokens that end a text. Raises ModelLoadError if GGUF cannot express it."""
    content = json.loads(tokenizer.backend.to_str())
    model, added = content["model"], content.get("added_tokens") or []
    if tokenizer.vocab_size > vocab_size:
        raise ModelLoadError(
            f"{directory}: its tokenizer has {tokenizer.vocab_size} tokens, and the model {vocab_size}; {WITHOUT}"
        )
    if model.get("type") != "BPE":
        raise ModelLoadError(f"{directory}: a tokenizer of the kind {model.get('type')} is not written; {WITHOUT}")
    if _is_byte_level(content):
        own = _byte_level(content, model, added, directory)
    else:
        own = _sentencepiece(_pieces(content, model, added, directory))
    tokens, kinds = own["tokens"], own["token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    missing = range(len(tokens), vocab_size)
    tokens += [f"[PAD{token_id}]" for token_id in missing]
    kinds += [UNUSED] * len(missing)
    if isinstance(scores := own.get("scores"), list):
        scores += [_LEAST_SCORE] * len(missing)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in own.items()}
    metadata |= _special(tokenizer, end_ids)
    if tokenizer.chat_template is not None:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata


def check_same_ids(tokenizer: Tokenizer, found: Tokenizer) -> None:
    """Raise ModelLoadError if the exported tokenizer gives other ids."""
    for text in SAMPLES:
        if tokenizer.encode(text) != found.encode(text):
            raise ModelLoadError(
                f"{tokenizer.name}: a GGUF file cannot carry its tokenizer: the ids of {text[:40]!r} would be others; "
                f"{WITHOUT}"
            )


def _is_byte_level(content: Mapping[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(content.get("pre_tokenizer"), "pretokenizers"))


def _steps(node: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    if node is None:
        return []
    return [step for each in node[inner] for step in _steps(each, inner)] if node["type"] == "Sequence" else [node]


def _byte_level(
    content: Mapping[str, Any], model: Mapping[str, Any], added: Sequence[Mapping[str, Any]], directory: Path
) -> dict[str, Value]:
    tokens = _by_id(model["vocab"], added)
    kinds = [NORMAL if token is not None else UNUSED for token in tokens]
    for token in added:
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    merges = [" ".join(each) if isinstance(each, list) else each for each in model["merges"]]
    own: dict[str, Value] = {
        "model": "gpt2",
        "pre": _rule(content, model, directory),
        "tokens": [f"[PAD{place}]" if token is None else token for place, token in enumerate(tokens)],
        "token_type": kinds,
    }
    return own | ({"merges": merges} if merges else {})


def _by_id(vocabulary: Mapping[str, int], added: Sequence[Mapping[str, Any]]) -> list[str | None]:
    by_id = {token_id: token for token, token_id in vocabulary.items()}
    by_id |= {token["id"]: token["content"] for token in added}
    return [by_id.get(token_id) for token_id in range(max(by_id) + 1)]


def _rule(content: Mapping[str, Any], model: Mapping[str, Any], directory: Path) -> str:
    steps = _steps(content.get("pre_tokenizer"), "pretokenizers")
    patterns = tuple(step["pattern"].get("Regex") for step in steps if step["type"] == "Split")
    uses_own = any(step["type"] == "ByteLevel" and step.get("use_regex", True) for step in steps)
    digits = any(step["type"] == "Digits" and step["individual_digits"] for step in steps)
    is_composed = any(step["type"] == "NFC" for step in _steps(content.get("normalizer"), "normalizers"))
    wanted = (patterns, uses_own, digits)
    fitting = []
    for name, rule in SPLITTINGS.items():
        own = () if rule.pattern is None else (*rule.before, rule.pattern)
        if (own, rule.pattern is None, rule.single_digits) == wanted:
            fitting.append((rule.nfc == is_composed, rule.whole_words == bool(model.get("ignore_merges")), name))
    if not fitting:
        raise ModelLoadError(
            f"{directory}: the rule by which its tokenizer splits words has no name in files; {WITHOUT}"
        )
    return max(fitting, key=lambda each: each[:2])[2]


def _pieces(
    content: Mapping[str, Any], model: Mapping[str, Any], added: Sequence[Mapping[str, Any]], directory: Path
) -> SentencePieces:
    file = directory / _SENTENCEPIECE_FILE
    if file_bytes(file) is None:
        found = _by_merges(content, model, added, directory)
    else:
        found = read_sentencepiece(read_model_file(file, MAX_SENTENCEPIECE_BYTES), file)
        if found.model != BPE:
            raise ModelLoadError(f"{file}: a unigram model is not written; {WITHOUT}")
    pieces, scores, kinds = list(found.pieces), list(found.scores), list(found.kinds)
    for token in sorted(added, key=lambda each: int(each["id"])):
        place = int(token["id"])
        for missing in range(len(pieces), place + 1):
            pieces.append(f"[PAD{missing}]")
            scores.append(_LEAST_SCORE)
            kinds.append(UNUSED)
        pieces[place] = token["content"]
        if kinds[place] != UNKNOWN:
            kinds[place] = CONTROL if token["special"] else USER_DEFINED
    return replace(found, pieces=pieces, scores=scores, kinds=kinds)


def _by_merges(
    content: Mapping[str, Any], model: Mapping[str, Any], added: Sequence[Mapping[str, Any]], directory: Path
) -> SentencePieces:
    if not model.get("byte_fallback"):
        raise ModelLoadError(f"{directory}: its tokenizer is neither byte-level nor sentencepiece's; {WITHOUT}")
    adds_space = any(step["type"] == "Prepend" for step in _steps(content.get("normalizer"), "normalizers"))
    for step in _steps(content.get("pre_tokenizer"), "pretokenizers"):
        adds_space |= step["type"] == "Metaspace" and step.get("prepend_scheme") != "never"
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        ranks.setdefault("".join(merge) if isinstance(merge, list) else merge.replace(" ", "", 1), rank)
    tokens = _by_id(model["vocab"], added)
    kinds = []
    for token in tokens:
        is_byte = token is not None and _BYTE_PIECE.fullmatch(token) is not None
        kinds.append(BYTE if is_byte else UNKNOWN if token == model.get("unk_token") else NORMAL)
    kinds = [UNUSED if token is None else kind for token, kind in zip(tokens, kinds, strict=True)]
    pieces = [f"[PAD{place}]" if token is None else token for place, token in enumerate(tokens)]
    return SentencePieces(
        pieces, [-float(ranks.get(piece, len(ranks))) for piece in pieces], kinds, adds_space=adds_space
    )


def _sentencepiece(pieces: SentencePieces) -> dict[str, Value]:
    # GGUF files write user-defined pieces, such as runs of spaces, with plain spaces.
    tokens = [
        piece.replace(SPACE, " ") if kind == USER_DEFINED else piece
        for piece, kind in zip(pieces.pieces, pieces.kinds, strict=True)
    ]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": [float(score) for score in pieces.scores],
        "token_type": list(pieces.kinds),
        "add_space_prefix": pieces.adds_space,
    }


def _special(tokenizer: Tokenizer, end_ids: Sequence[int]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name, key in SPECIAL_KEYS.items():
        token = tokenizer.special_tokens.get(name)
        token_id = None if token is None else tokenizer.token_to_id(token)
        if token_id is not None:
            found[f"tokenizer.ggml.{key}"] = token_id
    own = tokenizer.eos_token_id
    ends = [token_id for token_id in end_ids if token_id != own]
    if own is None and ends:
        found["tokenizer.ggml.eos_token_id"] = ends.pop(0)
    found |= {f"tokenizer.ggml.{key}": token_id for key, token_id in zip(_END_KEYS, ends, strict=False)}
    around = tokenizer.encode("a")
    inside = tokenizer.encode("a", add_special_tokens=False)
    found["tokenizer.ggml.add_bos_token"] = len(around) > len(inside) and around[0] == tokenizer.bos_token_id
    found["tokenizer.ggml.add_eos_token"] = len(around) > len(inside) and around[-1] == own
    return found
