"""Tokenizers whose files list pieces or ranks: ids are those of the algorithms written out, on 10,000 texts each."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import regex

from quire.errors import ModelLoadError, UserError
from quire.tokenization.ranked_bpe import KIMI_PATTERN
from quire.tokenization.sentencepiece import BPE, NORMAL, SPACE, UNIGRAM
from quire.tokenization.tokenizer import Tokenizer, load_tokenizer
from tests.fakes.gguf import FLOAT32, INT32, GGUFWriter, Typed, typed
from tests.long import all_but_long, one_in
from tests.tokenization.build import CORPUS
from tests.tokenization.reference_pieces import (
    bpe_ids,
    charsmap,
    join_best,
    mapped,
    random_texts,
    sentencepiece_vocabulary,
    to_proto,
    trained,
    unigram_ids,
)

PIECES, SCORES, KINDS = sentencepiece_vocabulary()
TEKKEN_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def gguf(tmp_path: Path, kind: str, **options: Any) -> Tokenizer:
    keys = {
        "general.architecture": typed("llama"),
        "tokenizer.ggml.model": typed(kind),
        "tokenizer.ggml.tokens": typed(options.get("tokens", PIECES)),
        "tokenizer.ggml.scores": Typed(FLOAT32, options.get("scores", SCORES)),
        "tokenizer.ggml.token_type": Typed(INT32, options.get("kinds", KINDS)),
        "tokenizer.ggml.bos_token_id": typed(1),
        "tokenizer.ggml.eos_token_id": typed(2),
        "tokenizer.ggml.add_space_prefix": typed(options.get("adds_space", True)),
    }
    return load_tokenizer(GGUFWriter(keys).write(tmp_path / "model.gguf"))


def model_file(tmp_path: Path, kind: int, *, adds_space: bool, scores: list[float] = SCORES) -> Tokenizer:
    options = {"add_dummy_prefix": int(adds_space), "remove_extra_whitespaces": 0}
    (tmp_path / "tokenizer.model").write_bytes(to_proto(PIECES, scores, KINDS, kind, **options))
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize(("adds_space", "source"), one_in(3, [True, False], ["file", "gguf"]))
def test_sentencepiece_bpe(tmp_path: Path, source: str, adds_space: bool) -> None:
    tokenizer = (
        gguf(tmp_path, "llama", adds_space=adds_space)
        if source == "gguf"
        else model_file(tmp_path, BPE, adds_space=adds_space)
    )
    texts = random_texts(10_000)
    found = tokenizer.encode_batch(texts)
    for text, ids in zip(texts, found, strict=True):
        assert ids == [1, *bpe_ids(text, PIECES, SCORES, KINDS, adds_space=adds_space)], text
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    if not adds_space:
        assert [tokenizer.decode(ids) for ids in found] == texts
    a, b = (bpe_ids(text, PIECES, SCORES, KINDS, adds_space=adds_space) for text in ("a", " b"))
    assert tokenizer.encode("a<s> b</s>", False) == [*a, 1, *b, 2], "control pieces are read in a text, and divide it"


@pytest.mark.parametrize("source", all_but_long(["gguf", "file"], ["file"]))
def test_sentencepiece_unigram(tmp_path: Path, source: str) -> None:
    # Irregular scores: no two ways to cut a text add up to the same.
    scores = [-1.0 - (index * 7919 % 1013) / 97.0 for index in range(len(PIECES))]
    kinds = [kind if kind != 6 else NORMAL for kind in KINDS]
    if source == "gguf":
        tokenizer = gguf(tmp_path, "t5", scores=scores, kinds=kinds, adds_space=False)
    else:
        options = {"add_dummy_prefix": 0, "remove_extra_whitespaces": 0}
        (tmp_path / "tokenizer.model").write_bytes(to_proto(PIECES, scores, kinds, UNIGRAM, **options))
        tokenizer = load_tokenizer(tmp_path)
    texts = [text for text in random_texts(10_000) if "\n\n" not in text]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids == [*unigram_ids(text.replace(" ", SPACE), PIECES, scores, 0), 2], text


@pytest.mark.long
def test_the_first_of_two_places_where_a_piece_can_be_made(tmp_path: Path) -> None:
    """Runs of spaces and letters, whose pieces can be made in several ways. Pieces that are unused are taken apart."""
    sizes = [2, 4, 8, 16, 3, 5, 7, 6, 9, 15]
    made = [*(SPACE * size for size in sizes), *("a" * size for size in sizes), "aba", f"b{SPACE}", "ab"]
    pieces = ["<unk>", *made, "a", "b", SPACE, "aaaab"]
    scores = [0.0, *(-float(rank) for rank in range(len(made))), *[-100.0] * 4]
    kinds = [2] + [NORMAL] * (len(pieces) - 2) + [5]
    options = {"add_dummy_prefix": 0, "remove_extra_whitespaces": 0}
    (tmp_path / "tokenizer.model").write_bytes(to_proto(pieces, scores, kinds, BPE, **options))
    tokenizer = load_tokenizer(tmp_path)
    generator = random.Random(1)
    texts = ["".join(generator.choice("a b") * generator.randrange(1, 40) for _ in range(6)) for _ in range(500)]
    kinds[-1] = 1  # what it is made of are pieces that end up side by side without it, too
    expected = [bpe_ids(text, pieces[:-1], scores[:-1], kinds[:-1], adds_space=False) for text in texts]
    assert tokenizer.encode_batch(texts, False) == expected
    assert tokenizer.encode("aaaab", False) == [pieces.index("aaaa"), pieces.index("b")]
    long_run = tokenizer.encode("a" * 20_000, False)
    assert long_run == [pieces.index("a" * 16)] * 1250


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_runs_of_spaces_that_the_user_defined(tmp_path: Path, kind: str) -> None:
    """Gemma's: converters write their spaces as they are, not as the sign that stands for one in all other pieces."""
    tokens = [*PIECES, "  ", "    "]
    tokenizer = gguf(tmp_path, kind, tokens=tokens, scores=[*SCORES, 0.0, 0.0], kinds=[*KINDS, 4, 4], adds_space=False)
    two, four = len(PIECES), len(PIECES) + 1
    a, b = (tokenizer.encode(letter, False) for letter in "ab")
    assert tokenizer.encode("a    b  a", False) == [*a, four, *b, two, *a]
    assert tokenizer.decode([*a, four, *b, two, *a]) == "a    b  a"


MARK = "\N{COMBINING ACUTE ACCENT}"
RULES = {
    "\t": " ",
    "Ä": "A",
    f"a{MARK}": "á",
    "ab": "ba",
    f"ab{MARK}": "x",
    "日本": "n",
    "ß": "",
    "\n\n": "  ",
    "🙂": "::",
}


@pytest.mark.parametrize("adds_space", [True, False])
@pytest.mark.parametrize(
    "rules", [RULES, {key: RULES[key] for key in RULES if not key.isascii()}], ids=["all", "other"]
)
def test_a_table_of_characters(tmp_path: Path, rules: dict[str, str], adds_space: bool) -> None:
    """The longest sequence of the table is replaced, marks behind letters included; the user's pieces are not."""
    table = charsmap(rules)
    options = {"add_dummy_prefix": int(adds_space), "remove_extra_whitespaces": 0}
    (tmp_path / "tokenizer.model").write_bytes(to_proto(PIECES, SCORES, KINDS, BPE, table, **options))
    tokenizer = load_tokenizer(tmp_path)
    texts = [text.replace("c", MARK).replace("e", "b") for text in random_texts(2000, seed=3)]
    assert sum(mapped(text, rules) != text for text in texts) > 500
    for text, ids in zip(texts, tokenizer.encode_batch(texts, False), strict=True):
        plain = "\n\n".join(mapped(part, rules) for part in text.split("\n\n"))
        assert ids == bpe_ids(plain, PIECES, SCORES, KINDS, adds_space=adds_space), text


def test_what_the_user_defined_is_better_than_any_pieces(tmp_path: Path) -> None:
    """Of a Unigram model; where two overlap in a run, scores decide, not the place. (As sentencepiece 0.2.3 has it.)"""
    pieces = ["<unk>", "a", "b", "ab", "bab", "abab", "aa", SPACE]
    scores = [0.0, -1.0, -1.0, -1.1, -1.2, 0.0, 0.0, -9.0]
    kinds = [2, 1, 1, 1, 1, 4, 4, 1]
    expected = {"abab": [5], "babab": [2, 5], "cabab": [0, 5], "aaa": [1, 6], "aab": [6, 2]}
    options = {"add_dummy_prefix": 0, "remove_extra_whitespaces": 0}
    (tmp_path / "tokenizer.model").write_bytes(to_proto(pieces, scores, kinds, UNIGRAM, **options))
    tokenizer = load_tokenizer(tmp_path)
    assert {text: tokenizer.encode(text, False) for text in expected} == expected


def test_a_space_before_and_spaces_joined(tmp_path: Path) -> None:
    """As T5 has them: the text's spaces at its ends go, and each word begins with one."""
    scores = [-1.0 - index / 97.0 for index in range(len(PIECES))]
    options = {"add_dummy_prefix": 1, "remove_extra_whitespaces": 1}
    (tmp_path / "tokenizer.model").write_bytes(to_proto(PIECES, scores, KINDS, UNIGRAM, **options))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("  the   fox ") == tokenizer.encode("the fox")
    assert tokenizer.decode(tokenizer.encode("  the   fox ")) == "the fox"


def ranked(num_merges: int = 150) -> list[bytes]:
    words = [word.encode().decode("latin-1") for word in regex.findall(KIMI_PATTERN, " ".join(CORPUS[:3]), regex.V1)]
    return [*(bytes([byte]) for byte in range(256)), *(each.encode("latin-1") for each in trained(words, num_merges))]


def ranked_ids(text: str, tokens: list[bytes], pattern: str, first_id: int) -> list[int]:
    ranks = {token.decode("latin-1"): rank for rank, token in enumerate(tokens)}
    words = (word.encode().decode("latin-1") for word in regex.findall(pattern, text, regex.V1))
    return [
        first_id + ranks[symbol]
        for word in words
        for symbol in ([word] if word in ranks else join_best(list(word), ranks))
    ]


def write_tiktoken(directory: Path, tokens: list[bytes], **config: Any) -> Path:
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    names = {len(tokens): "[BOS]", len(tokens) + 1: "[EOS]", len(tokens) + 7: "<|im_end|>"}
    own = {
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": {str(number): {"content": text} for number, text in names.items()},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(own | config))
    return directory


def test_tiktoken(tmp_path: Path) -> None:
    tokens = ranked()
    tokenizer = load_tokenizer(write_tiktoken(tmp_path, tokens))
    texts = [*random_texts(10_000), "语 language言s don't X'LL", "12345 ABCdef"]
    found = tokenizer.encode_batch(texts)
    for text, ids in zip(texts, found, strict=True):
        assert ids == ranked_ids(text, tokens, KIMI_PATTERN, 0), text
    assert [tokenizer.decode(ids) for ids in found] == texts
    count = len(tokens)
    specials = tokenizer.encode(f"a[EOS]<|im_end|><|reserved_token_{count + 9}|>")[1:]
    assert specials == [count + 1, count + 7, count + 9]
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (count + 256, count + 1)


def tekken(tokens: list[bytes], **changes: Any) -> dict[str, Any]:
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    return {
        "config": {
            "pattern": TEKKEN_PATTERN,
            "default_vocab_size": len(tokens) + 20,
            "default_num_special_tokens": 20,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)],
    } | changes


def test_tekken(tmp_path: Path) -> None:
    tokens = ranked()
    values = tekken([*tokens, b"beyond the size"])
    values["config"]["default_vocab_size"] -= 1
    (tmp_path / "tekken.json").write_text(json.dumps(values))
    tokenizer = load_tokenizer(tmp_path)
    texts = random_texts(10_000, seed=1)
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids == [1, *ranked_ids(text, tokens, TEKKEN_PATTERN, 20)], text
    assert tokenizer.encode("[INST]<SPECIAL_19>", False) == [3, 19]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, len(tokens) + 20)


def test_a_pattern_that_backtracks_without_end(tmp_path: Path) -> None:
    """The library gives up with a panic: an error of that text, after which other texts are encoded."""
    values = tekken(ranked(20))
    values["config"]["pattern"] = "(a+)+$"
    (tmp_path / "tekken.json").write_text(json.dumps(values))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="takes too many attempts"):
        tokenizer.encode("a" * 200 + "b")
    assert tokenizer.decode(tokenizer.encode("b" * 200)) == "b" * 200


TWICE = ["<unk>", "a", "a"]
PROTO = to_proto(PIECES, SCORES, KINDS, BPE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a sentencepiece model", "is not a sentencepiece model"),
        (b"", "0 pieces and model type"),
        (PROTO[:1000], "reaches beyond the end"),
        (to_proto(TWICE, [0.0] * 3, [2, 1, 1], BPE), "the piece 'a' is there twice, as 1 and 2"),
        (to_proto(["<unk>"], [0.0], [2], 4), "BPE and Unigram models are supported"),
        (to_proto(["<unk>", "a" * 600], [0.0] * 2, [2, 1], BPE), "has 600 characters, more than 512"),
        (b"\x80" * 40, "a number of more than ten bytes"),
        (to_proto(PIECES, SCORES, KINDS, BPE, escape_whitespaces=0), "are not supported"),
        (to_proto(PIECES, SCORES, KINDS, BPE, treat_whitespace_as_suffix=1), "are not supported"),
        (to_proto(PIECES, SCORES, KINDS, BPE, b"\0\0\0\0"), "precompiled_charsmap has no index"),
    ],
)
def test_a_sentencepiece_model_that_cannot_be_read(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "config", "message"),
    [
        (ranked(3), {"tokenizer_class": "QWenTokenizer"}, "does not say how it splits words"),
        (ranked(3)[1:], {}, "without 1 bytes"),
        ([*ranked(3), b"a"], {}, "260 tokens, of which 259 differ"),
        ([*ranked(3), b"a" * 600], {}, "has 600 characters, more than 512"),
        (ranked(3), {"added_tokens_decoder": [1]}, "added_tokens_decoder must map ids to tokens"),
        (ranked(3), {"added_tokens_decoder": {"259": {"content": "a"}}}, "the special token 'a' is a token"),
    ],
)
def test_a_tiktoken_model_that_cannot_be_read(
    tmp_path: Path, tokens: list[bytes], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(write_tiktoken(tmp_path, tokens, **config))


@pytest.mark.parametrize("content", [b"x", b"YQ== 1\n", b"??? 0\n", b"YQ==\n"])
def test_a_list_that_is_none(tmp_path: Path, content: bytes) -> None:
    write_tiktoken(tmp_path, [])
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(ModelLoadError, match="is not a list of tokens in base64"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": 3}, "config must be an object"),
        ({"vocab": []}, "vocab must list 259 tokens"),
        ({"vocab": [{"rank": 1, "token_bytes": "YQ=="}] * 300}, "ranks do not count from 0"),
        ({"vocab": [{}] * 300}, "a token cannot be read"),
        ({"special_tokens": [{"rank": 0}]}, "a token cannot be read"),
    ],
)
def test_a_tekken_that_cannot_be_read(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(ranked(3), **changes)))
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(tmp_path)


def test_scores_for_each_piece(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="must have a score for each"):
        gguf(tmp_path, "llama", scores=SCORES[1:])
