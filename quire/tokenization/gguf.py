"""Tokenizer in a GGUF file: vocabulary, merges, and the name of its rule for splitting words.

It is byte-level BPE, sentencepiece, or BERT's WordPiece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from quire.config.gguf import END_NAMES, NO_TOKEN, end_tokens
from quire.config.hf_json import Fields
from quire.errors import ModelLoadError
from quire.tokenization.ranked_bpe import KIMI_PATTERN
from quire.tokenization.sentencepiece import (
    BPE,
    CONTROL,
    NORMAL,
    SPACE,
    UNIGRAM,
    UNUSED,
    USER_DEFINED,
    SentencePieces,
    sentencepiece_backend,
)
from quire.tokenization.vocabulary_limits import check_num_values, check_pieces
from quire.utils.gguf import GGUFFile

SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the format's spelling
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
    "cls_token": "cls_token_id",
}

_LONGEST_WORD = 100
"""Maximum characters in a word that BERT splits; longer ones are unknown."""
_SENTENCEPIECE = {"llama": BPE, "t5": UNIGRAM}
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)


@dataclass(frozen=True)
class _Splitting:
    """Rule that splits a text into words. pattern: regular expression of a word; None for GPT-2's. before: patterns to
    split off first. single_digits: split off each digit first. whole_words: keep a word that is a token whole. nfc:
    apply NFC first. adds_bos: prepend the beginning-of-sequence token unless the file says otherwise."""

    pattern: str | None = None
    before: tuple[str, ...] = ()
    single_digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    adds_bos: bool = False


_LLAMA3 = _Splitting(rf"{_WORD}|\p{{N}}{{1,3}}|{_TAIL}", whole_words=True, adds_bos=True)
_QWEN2 = _Splitting(rf"{_WORD}|\p{{N}}|{_TAIL}", nfc=True)
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = _Splitting(
    rf"{_CASED.replace('|', f'{_CONTRACTED}|')}{_CONTRACTED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = _Splitting(rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}", whole_words=True, adds_bos=True)
_QWEN35 = _Splitting(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    nfc=True,
)
_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = _Splitting(
    rf"{_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    before=(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+"),
)
_CASED_LETTERS = (
    r"\x{41}-\x{5a}\x{61}-\x{7a}\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}"
    r"\x{295}-\x{2af}\x{370}-\x{373}\x{376}-\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}"
    r"\x{38e}-\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}"
    r"\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}"
    r"\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}"
    r"\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}"
    r"\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}"
    r"\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}"
    r"\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}-\x{2184}\x{2c00}-\x{2c7b}"
    r"\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}-\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}\x{a722}-\x{a76f}"
    r"\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}"
    r"\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}"
    r"\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
"""Cased letters of DeepSeek's first tokenizer, which has Georgian capitals but no small ones."""
_DEEPSEEK = _Splitting(
    r"\p{N}",
    before=(
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
        r"\s+$",
        r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+",
    ),
)
SPLITTINGS: Mapping[str, _Splitting] = {
    "gpt-2": _Splitting(),
    "smollm": _Splitting(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "deepseek-llm": _DEEPSEEK,
    "deepseek-v3": _DEEPSEEK3,
    "kimi-k2": _Splitting(KIMI_PATTERN),
    "tekken": _TEKKEN,
    "gpt-4o": _O200K,
    "llama4": _O200K,
}
"""Rules by their name in tokenizer.ggml.pre."""
_BUNDLED = (
    r"(?<=\n)[ \t]+| ?[^\s\p{L}\p{N}_]?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+[\r\n]*"
    rf"|{_SPACES}"
)
KNOWN_PATTERNS = frozenset(
    {_BUNDLED}
    | {pattern for each in SPLITTINGS.values() for pattern in (each.pattern, *each.before) if pattern is not None}
)
"""Word patterns of published models and the bundled one, which take linear time."""


def read_gguf_tokenizer(
    file: GGUFFile, max_values: int
) -> tuple[tokenizers.Tokenizer, dict[str, Any], SentencePieces | None]:
    """Tokenizer, the equivalent of its tokenizer_config.json, and the sentencepiece model, if any. Raises
    ModelLoadError for a missing, unsupported or corrupt tokenizer, or more than `max_values` tokens and parts of
    merges."""
    fields = Fields(
        {key.removeprefix("tokenizer."): value for key, value in file.metadata.items()}, f"{file.path} (tokenizer)"
    )
    instead = "name one with the option tokenizer, or set skip_tokenizer_init to work on token ids"
    kind = fields.values.get("ggml.model")
    if kind is None:
        raise file.error(f"it carries no tokenizer; {instead}")
    if kind in _SENTENCEPIECE:
        return _sentencepiece(file, fields, _SENTENCEPIECE[kind], max_values)
    if kind == "bert":
        return *_wordpiece(file, fields, max_values), None
    if kind != "gpt2":
        raise file.error(f"it carries a tokenizer of the kind {kind!r}, which cannot be read from GGUF; {instead}")
    rule = fields.text("ggml.pre", "(none)")
    if rule not in SPLITTINGS:
        raise file.error(f"its pre-tokenizer {rule!r} is not known (known: {', '.join(SPLITTINGS)}); {instead}")
    splitting = SPLITTINGS[rule]
    tokens, kinds = _vocabulary(file)
    config = _config(fields, tokens, adds_bos=splitting.adds_bos, adds_eos=False)
    merges = file.strings("tokenizer.ggml.merges") or []
    check_num_values(file.path, len(tokens) + 2 * len(merges), max_values)
    return _backend(file, tokens, kinds, splitting, merges), config, None


def _sentencepiece(
    file: GGUFFile, fields: Fields, model: int, max_values: int
) -> tuple[tokenizers.Tokenizer, dict[str, Any], SentencePieces]:
    tokens, kinds = _vocabulary(file)
    scores = file.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise file.error(f"tokenizer.ggml.scores must have a score for each of the {len(tokens)} tokens")
    check_num_values(file.path, 2 * len(tokens), max_values)
    table = file.numbers("tokenizer.ggml.precompiled_charsmap") or []
    try:
        charsmap = bytes(int(value) & 255 for value in table)
    except (ValueError, OverflowError):
        raise file.error("tokenizer.ggml.precompiled_charsmap must hold bytes") from None
    # llama.cpp's converter writes user-defined pieces, such as runs of spaces, with plain spaces.
    texts = [
        token.replace(" ", SPACE) if kind == USER_DEFINED else token for token, kind in zip(tokens, kinds, strict=True)
    ]
    pieces = SentencePieces(
        texts,
        [float(score) for score in scores],
        [int(kind) for kind in kinds],
        model=model,
        charsmap=charsmap,
        adds_space=fields.boolean("ggml.add_space_prefix", True),
        joins_spaces=fields.boolean("ggml.remove_extra_whitespaces", False),
    )
    config = _config(fields, tokens, adds_bos=model == BPE, adds_eos=model == UNIGRAM)
    try:
        return sentencepiece_backend(pieces), config, pieces
    except ModelLoadError as error:
        raise file.error(error.message) from None


def _wordpiece(file: GGUFFile, fields: Fields, max_values: int) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    tokens, kinds = _vocabulary(file)
    check_num_values(file.path, len(tokens), max_values)
    own = [_bert_name(token, kind) for token, kind in zip(tokens, kinds, strict=True)]
    vocabulary = {token: token_id for token_id, token in enumerate(own)}
    config = _config(fields, own, adds_bos=True, adds_eos=True)
    # Older files name [CLS] and [SEP] only as bos and eos; newer ones only as cls and sep.
    config["bos_token"] = config.get("cls_token") or config.get("bos_token") or "[CLS]"
    config["eos_token"] = config.get("sep_token") or config.get("eos_token") or "[SEP]"
    lacking = [config[name] for name in ("bos_token", "eos_token") if config[name] not in vocabulary]
    if lacking:
        raise file.error(f"its vocabulary lacks {lacking[0]!r}, which stands around every text")
    # A lowercase vocabulary means a lowercasing tokenizer; only newer files say so.
    is_cased = any(token != token.lower() for token, kind in zip(own, kinds, strict=True) if kind == NORMAL)
    strips = fields.values.get("ggml.normalizer.strip_accents")
    backend = tokenizers.Tokenizer(
        models.WordPiece(vocabulary, unk_token=config.get("unk_token", "[UNK]"), max_input_chars_per_word=_LONGEST_WORD)
    )
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=fields.boolean("ggml.normalizer.lowercase", not is_cased),
        strip_accents=None if strips is None else fields.boolean("ggml.normalizer.strip_accents", False),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = [token for token, kind in zip(own, kinds, strict=True) if kind == CONTROL]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    return backend, config


def _bert_name(token: str, kind: float) -> str:
    if kind == CONTROL or (token.startswith("[") and token.endswith("]")):
        return token
    return token[1:] if token.startswith(SPACE) else f"##{token}"


def _config(fields: Fields, tokens: list[str], *, adds_bos: bool, adds_eos: bool) -> dict[str, Any]:
    """Equivalent of tokenizer_config.json. adds_bos, adds_eos: defaults."""
    config: dict[str, Any] = _special_tokens(fields, tokens)
    config["add_bos_token"] = fields.boolean("ggml.add_bos_token", adds_bos)
    config["add_eos_token"] = fields.boolean("ggml.add_eos_token", adds_eos)
    if fields.values.get("chat_template") is not None:
        config["chat_template"] = fields.text("chat_template")
    return config


def _vocabulary(file: GGUFFile) -> tuple[list[str], list[int | float]]:
    tokens = file.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise file.error("tokenizer.ggml.tokens is missing or empty")
    check_pieces(file.path, tokens)
    kinds = file.numbers("tokenizer.ggml.token_type")
    if kinds is None:
        kinds = [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise file.error(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    named = {token: token_id for token_id, token in enumerate(tokens) if token in END_NAMES}
    for token_id in end_tokens(named).values():
        kinds[token_id] = CONTROL  # some converters write another kind
    return tokens, kinds


def _backend(
    file: GGUFFile, tokens: list[str], kinds: list[int | float], splitting: _Splitting, joined_merges: list[str]
) -> tokenizers.Tokenizer:
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if kinds[token_id] == UNUSED:
            continue
        if token in vocabulary:
            raise file.error(f"tokenizer.ggml.tokens has {token!r} twice, as {vocabulary[token]} and {token_id}")
        vocabulary[token] = token_id
    merges = []
    for merge in joined_merges:
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise file.error("tokenizer.ggml.merges must be pairs of tokens with one space between them")
        merges.append((left, right))
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitting.whole_words)
    except Exception as error:  # the library raises plain Exception
        raise file.error(f"its vocabulary and merges do not fit together: {error}") from None
    backend = tokenizers.Tokenizer(model)
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None)
    if splitting.pattern is not None:
        patterns = (*splitting.before, splitting.pattern)
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    elif splitting.single_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        texts = [token for token, own in zip(tokens, kinds, strict=True) if own == kind and token]
        backend.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False) for text in texts])
    return backend


def _special_tokens(fields: Fields, tokens: list[str]) -> dict[str, str]:
    found = {}
    for name, key in SPECIAL_KEYS.items():
        token_id = fields.optional_integer(f"ggml.{key}", minimum=0, maximum=NO_TOKEN)
        if token_id is None:
            continue
        if token_id >= len(tokens):
            raise fields.error(f"ggml.{key} is {token_id}, and there are {len(tokens)} tokens")
        found[name] = tokens[token_id]
    return found
