"""Tokenizers out of GGUF files: the same ids as the tokenizer that the file was written from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from quire import LLM
from quire.errors import ModelLoadError
from quire.tokenization.tokenizer import Tokenizer, load_tokenizer
from tests.fakes.gguf import FLOAT32, INT32, GGUFWriter, Typed, typed
from tests.fakes.gguf_model import to_gguf
from tests.models.families import llama
from tests.tokenization.build import CORPUS, byte_level_backend

TEXTS = [
    *CORPUS[:3],
    "",
    "I'll say: they'RE 12345 times 678, isn't it?  \n\n  yes\t\r\n \n",
    "café naïve ＦＵＬＬ ½ ② 日本語のテキスト e\u0301 {}[]()//\n/ a_b",
    "<s>marked<|im_start|>user\n spaced out</s>日本",
    "   leading,   double   and trailing   ",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    r"[!\x22#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-\x{d7ff}]+",
)
"""As the tokenizer.json files of these families have them. (DeepSeek's first lists its letters: of those
in these texts, the ones of these categories.)"""
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As in the code of Kimi's checkpoints."""


def by_pattern(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


RULES: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": lambda: by_pattern(LLAMA3),
    "qwen2": lambda: by_pattern(QWEN2),
    "tekken": lambda: by_pattern(TEKKEN),
    "gpt-4o": lambda: by_pattern(O200K),
    "qwen35": lambda: by_pattern(QWEN35),
    "deepseek-v3": lambda: by_pattern(*DEEPSEEK3),
    "deepseek-llm": lambda: pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in DEEPSEEK),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "kimi-k2": lambda: by_pattern(KIMI),
}


def reference(rule: str) -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    backend.pre_tokenizer = RULES[rule]()
    if rule in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    if rule in ("llama-bpe", "tekken"):
        backend.model.ignore_merges = True
    return backend


def writer_of(backend: tokenizers.Tokenizer, rule: str) -> GGUFWriter:
    """The vocabulary as converters write it, with two unused tokens at its end."""
    parts = json.loads(backend.to_str())
    added = {entry["id"]: entry for entry in parts["added_tokens"]}
    by_id = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
    tokens = [by_id[token_id] for token_id in range(len(by_id))] + ["[PAD1]", "[PAD2]"]
    kinds = [1 if i not in added else 3 if added[i]["special"] else 4 for i in range(len(by_id))] + [5, 5]
    keys = {"model": "gpt2", "pre": rule, "bos_token_id": 0, "eos_token_id": 1, "tokens": tokens}
    metadata = {f"tokenizer.ggml.{key}": typed(value) for key, value in keys.items()}
    metadata["tokenizer.ggml.token_type"] = Typed(INT32, kinds)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in parts["model"]["merges"]]
    metadata["tokenizer.ggml.merges"] = typed(merges)
    return GGUFWriter(metadata)


def loaded(writer: GGUFWriter, tmp_path: Path) -> Tokenizer:
    return load_tokenizer(writer.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("rule", list(RULES))
def test_ids_are_those_of_the_original(rule: str, tmp_path: Path) -> None:
    backend = reference(rule)
    tokenizer = loaded(writer_of(backend, rule), tmp_path)
    for text in TEXTS:
        expected = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        assert tokenizer.decode(expected, False) == backend.decode(expected, skip_special_tokens=False)
        assert tokenizer.decode(expected) == backend.decode(expected)
        # Few words of these texts are tokens: that they are the same words is seen before the merges.
        split = tokenizer.backend.pre_tokenizer
        assert split.pre_tokenize_str(text) == backend.pre_tokenizer.pre_tokenize_str(text)
    adds_bos = rule in ("llama-bpe", "tekken")
    assert tokenizer.encode("fox") == [0] * adds_bos + backend.encode("fox", add_special_tokens=False).ids


def test_the_rules_differ(tmp_path: Path) -> None:
    """Each pair of rules splits some text differently, so that the comparison above tells them apart."""
    splits = {
        rule: [[word for word, _ in make().pre_tokenize_str(text)] for text in TEXTS] for rule, make in RULES.items()
    }
    rules = list(RULES)
    assert all(splits[a] != splits[b] for i, a in enumerate(rules) for b in rules[i + 1 :])


@pytest.mark.parametrize(
    ("alias", "rule"), [("llama3", "llama-bpe"), ("deepseek-r1-qwen", "qwen2"), ("llama4", "gpt-4o")]
)
def test_other_names_of_a_rule(alias: str, rule: str, tmp_path: Path) -> None:
    tokenizer = loaded(writer_of(reference(rule), alias), tmp_path)
    ids = reference(rule).encode(TEXTS[4], add_special_tokens=False).ids
    assert tokenizer.encode(TEXTS[4], add_special_tokens=False) == ids


def test_whole_words_are_not_taken_apart(tmp_path: Path) -> None:
    """With llama-bpe a word of the vocabulary is one token even where no merges lead to it."""
    backend = reference("llama-bpe")
    writer = writer_of(backend, "llama-bpe")
    tokens = writer.metadata["tokenizer.ggml.tokens"].value
    unmerged = len(tokens) - 2
    tokens[unmerged] = "zebra"
    writer.metadata["tokenizer.ggml.token_type"].value[unmerged] = 1
    assert loaded(writer, tmp_path).encode("zebra", add_special_tokens=False) == [unmerged]
    writer.metadata["tokenizer.ggml.pre"] = typed("qwen2")
    assert len(loaded(writer, tmp_path).encode("zebra", add_special_tokens=False)) > 1


def test_tokens_of_the_user_are_found_as_they_are_written(tmp_path: Path) -> None:
    """Before the text is composed, as llama.cpp finds them."""
    writer = writer_of(reference("qwen2"), "qwen2")
    token_id = len(writer.metadata["tokenizer.ggml.tokens"].value) - 1
    writer.metadata["tokenizer.ggml.tokens"].value[token_id] = "Z\u00e9"
    writer.metadata["tokenizer.ggml.token_type"].value[token_id] = 4
    tokenizer = loaded(writer, tmp_path)
    assert tokenizer.encode("Z\u00e9") == [token_id]
    assert token_id not in tokenizer.encode("Ze\u0301")


def test_special_tokens_and_template(tmp_path: Path) -> None:
    writer = writer_of(reference("gpt-2"), "gpt-2")
    writer.metadata |= {
        "tokenizer.chat_template": typed("{{ messages[0]['content'] }}"),
        "tokenizer.ggml.add_bos_token": typed(True),
        "tokenizer.ggml.add_eos_token": typed(True),
        "tokenizer.ggml.padding_token_id": typed(2),
    }
    tokenizer = loaded(writer, tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|im_start|>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    inner = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox") == [0, *inner, 1]
    assert tokenizer.decode([0, *inner, 1]) == "fox"
    unused = len(writer.metadata["tokenizer.ggml.tokens"].value) - 1
    assert tokenizer.token_text(unused) == ""


def test_kinds_of_tokens_may_be_absent(tmp_path: Path) -> None:
    writer = writer_of(reference("gpt-2"), "gpt-2")
    del writer.metadata["tokenizer.ggml.token_type"]
    tokenizer = loaded(writer, tmp_path)
    assert tokenizer.special_ids == frozenset({1}), "</s> is known by its name"
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def test_a_directory_prefers_its_own_files(tmp_path: Path) -> None:
    writer_of(reference("gpt-2"), "gpt-2").write(tmp_path / "model.gguf")
    assert load_tokenizer(tmp_path).token_to_id("</s>") == 1
    other = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"x": 0}, merges=[]))
    other.add_special_tokens([AddedToken("</s>", special=True)])
    other.pre_tokenizer = pre_tokenizers.ByteLevel()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_start|>"}')
    assert load_tokenizer(tmp_path).eos_token_id == 2
    other.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).token_to_id("x") == 0


Change = Callable[[GGUFWriter], object]


def key(name: str, value: object) -> Change:
    return lambda writer: writer.metadata.update({f"tokenizer.{name}": typed(value)})


def without(name: str) -> Change:
    return lambda writer: writer.metadata.pop(f"tokenizer.{name}")


WRONG: dict[str, tuple[Change, str]] = {
    "none": (without("ggml.model"), "it carries no tokenizer; name one with the option tokenizer"),
    "sentencepiece": (key("ggml.model", "llama"), "tokenizer.ggml.scores must have a score for each of the"),
    "another kind": (key("ggml.model", "rwkv"), "a tokenizer of the kind 'rwkv'"),
    "rule": (key("ggml.pre", "viking"), r"its pre-tokenizer 'viking' is not known \(known: gpt-2"),
    "no rule": (without("ggml.pre"), r"its pre-tokenizer '\(none\)' is not known"),
    "no tokens": (without("ggml.tokens"), "tokenizer.ggml.tokens is missing or empty"),
    "tokens of numbers": (key("ggml.tokens", [1, 2]), "tokenizer.ggml.tokens must be a list of strings"),
    "kinds": (key("ggml.token_type", [1, 1]), "token_type has 2 entries for"),
    "token twice": (key("ggml.tokens", ["a", "a"]), "tokens has 'a' twice, as 0 and 1"),
    "merge of one": (key("ggml.merges", ["ab"]), "must be pairs of tokens with one space"),
    "merge of three": (key("ggml.merges", ["a b c"]), "must be pairs of tokens with one space"),
    "merge of strangers": (key("ggml.merges", ["never heard"]), "do not fit together: .*Token `never` out of vocab"),
    "special id": (key("ggml.bos_token_id", 10**6), "ggml.bos_token_id is 1000000, and there are"),
    "flag": (key("ggml.add_bos_token", 1), "ggml.add_bos_token must be true or false"),
    "template": (key("chat_template", 3), "chat_template must be a string"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_cannot_be_a_tokenizer(name: str, tmp_path: Path) -> None:
    change, message = WRONG[name]
    writer = writer_of(reference("gpt-2"), "gpt-2")
    change(writer)
    if name == "token twice":
        del writer.metadata["tokenizer.ggml.token_type"]
    with pytest.raises(ModelLoadError, match=message) as raised:
        loaded(writer, tmp_path)
    assert str(tmp_path / "model.gguf") in raised.value.message


def test_text_in_text_out(tmp_path: Path) -> None:
    """One file is model, tokenizer and template."""
    backend = reference("llama-bpe")
    writer = writer_of(backend, "llama-bpe")
    writer.metadata["tokenizer.chat_template"] = typed("<s>{{ messages[0]['content'] }}")
    writer.metadata["tokenizer.ggml.scores"] = Typed(FLOAT32, [0.0])
    model, _ = to_gguf(llama(vocab_size=len(writer.metadata["tokenizer.ggml.tokens"].value)), "llama")
    model.metadata |= writer.metadata
    path = model.write(tmp_path / "model.gguf")
    with LLM(str(path), num_blocks_override=16, num_threads=1) as llm:
        (plain,) = llm.generate("The fox", use_tqdm=False)
        (chat,) = llm.chat([{"role": "user", "content": "The fox"}], use_tqdm=False)
    ids = [0, *backend.encode("The fox", add_special_tokens=False).ids]
    assert plain.prompt_token_ids == chat.prompt_token_ids == ids


def test_a_tokenizer_can_be_named(tmp_path: Path) -> None:
    """A file whose own vocabulary cannot be read, with another file's tokenizer."""
    tokenizer = writer_of(reference("gpt-2"), "gpt-2").write(tmp_path / "tokenizer.gguf")
    model, _ = to_gguf(llama(vocab_size=400), "llama")
    model.metadata["tokenizer.ggml.model"] = typed("llama")
    path = model.write(tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.tokens is missing"):
        LLM(str(path), num_blocks_override=16, num_threads=1)
    with LLM(str(path), tokenizer=str(tokenizer), num_blocks_override=16, num_threads=1) as llm:
        assert llm.generate("fox", use_tqdm=False)[0].prompt_token_ids
