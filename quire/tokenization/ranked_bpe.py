"""Byte-level BPE from tokens by rank, without merges: `tiktoken.model` (Kimi) and `tekken.json` (Mistral).

The neighbours with the lowest-ranked union are joined.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from quire.config.hf_json import Fields, shown
from quire.errors import ModelLoadError
from quire.tokenization.vocabulary_limits import check_pieces

MAX_TOKENS = 2**20
TEKKEN_SPECIALS = 1000
"""Default number of special ids before the vocabulary in tekken.json."""

_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (rf"[\p{{{kind}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kind in (r"Lu}\p{Lt", "Ll"))
KIMI_PATTERN = (
    r"\p{Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CASE}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CASE}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Word pattern of Kimi's tokenizer."""
KIMI_CLASS = "TikTokenTokenizer"
KIMI_SPECIALS = 256
"""Number of ids after the vocabulary, named in tokenizer_config.json (`added_tokens_decoder`) or reserved."""


def ranked_bpe(
    tokens: Sequence[bytes], pattern: str, specials: Mapping[int, str], first_id: int = 0
) -> tokenizers.Tokenizer:
    """Build a tokenizer. tokens: by rank; ids count from `first_id`. pattern: regular expression of a word. specials:
    special tokens by id. Raises ModelLoadError for duplicate or overlong tokens, or a missing single byte."""
    letters = _letters()
    texts = ["".join(letters[byte] for byte in token) for token in tokens]
    vocabulary = {text: first_id + rank for rank, text in enumerate(texts)}
    missing = [byte for byte, letter in enumerate(letters) if letter not in vocabulary]
    if len(vocabulary) != len(texts) or len(texts) > MAX_TOKENS or missing:
        raise ModelLoadError(f"{len(texts)} tokens, of which {len(vocabulary)} differ, without {len(missing)} bytes")
    check_pieces("the vocabulary", (*texts, *specials.values()))
    pairs = []
    for rank, text in enumerate(texts):
        for cut in range(1, len(text)):
            left, right = vocabulary.get(text[:cut]), vocabulary.get(text[cut:])
            if left is not None and right is not None:
                pairs.append((rank, left, right))
    pairs.sort()
    merges = [(texts[left - first_id], texts[right - first_id]) for _, left, right in pairs]
    for special_id, text in specials.items():
        if vocabulary.setdefault(text, special_id) != special_id:
            raise ModelLoadError(f"the special token {shown(text)} is a token of the vocabulary")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    added = [tokenizers.AddedToken(text, special=True, normalized=False) for _, text in sorted(specials.items())]
    backend.add_special_tokens(added)
    return backend


def read_tiktoken(content: bytes, file: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Read a `tiktoken.model`: lines of a base64 token and its rank. config: tokenizer_config.json, which must name
    Kimi's class. Raises ModelLoadError."""
    kind = config.get("tokenizer_class")
    if kind != KIMI_CLASS:
        raise ModelLoadError(
            f"{file} does not say how it splits words: that is known for tokenizer_class {KIMI_CLASS!r} (Kimi), not "
            f"for {shown(kind)}"
        )
    tokens: list[bytes] = []
    try:
        for line in content.splitlines():
            token, _, rank = line.partition(b" ")
            if int(rank) != len(tokens):
                raise ValueError(f"rank {int(rank)} stands at {len(tokens)}")
            tokens.append(base64.b64decode(token, validate=True))
    except (ValueError, binascii.Error) as error:
        raise ModelLoadError(f"{file} is not a list of tokens in base64 with their ranks: {error}") from None
    named = added_tokens(config, file)
    first = len(tokens)
    specials = {each: named.get(each, f"<|reserved_token_{each}|>") for each in range(first, first + KIMI_SPECIALS)}
    return ranked_bpe(tokens, KIMI_PATTERN, {**specials, **named})


def read_tekken(values: Mapping[str, Any], file: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Read a `tekken.json`; also return the equivalent of its tokenizer_config.json. Raises ModelLoadError."""
    fields = Fields(values, str(file))
    config = Fields(_object(fields, "config"), f"{file}: config")
    num_specials = config.integer("default_num_special_tokens", TEKKEN_SPECIALS, minimum=3, maximum=MAX_TOKENS)
    size = config.integer("default_vocab_size", maximum=MAX_TOKENS)
    vocabulary = fields.values.get("vocab")
    if not isinstance(vocabulary, list) or len(vocabulary) < size - num_specials:
        raise fields.error(f"vocab must list {size - num_specials} tokens")
    try:
        listed = vocabulary[: size - num_specials]
        if [each["rank"] for each in listed] != list(range(len(listed))):
            raise ValueError("ranks do not count from 0")
        tokens = [base64.b64decode(each["token_bytes"], validate=True) for each in listed]
        named = {
            int(each["rank"]): str(each["token_str"]) for each in fields.values.get("special_tokens") or _old_specials()
        }
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise fields.error(f"a token cannot be read: {error!r}") from None
    specials = {each: named.get(each, f"<SPECIAL_{each}>") for each in range(num_specials)}
    own = {"bos_token": specials[1], "eos_token": specials[2], "unk_token": specials[0], "add_bos_token": True}
    return ranked_bpe(tokens, config.text("pattern"), specials, num_specials), own


def _old_specials() -> list[dict[str, Any]]:
    return [
        {"rank": rank, "token_str": text} for rank, text in enumerate(("<unk>", "<s>", "</s>", "[INST]", "[/INST]"))
    ]


def added_tokens(config: Mapping[str, Any], file: Path) -> dict[int, str]:
    listed = config.get("added_tokens_decoder") or {}
    try:
        found = {int(token_id): str(token["content"]) for token_id, token in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelLoadError(
            f"{file.parent / 'tokenizer_config.json'}: added_tokens_decoder must map ids to tokens"
        ) from None
    check_pieces(file.parent / "tokenizer_config.json", found.values())
    return found


def _object(fields: Fields, key: str) -> Mapping[str, Any]:
    value = fields.values.get(key)
    if not isinstance(value, dict):
        raise fields.error(f"{key} must be an object, not {shown(value)}")
    return value


def _letters() -> list[str]:
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
