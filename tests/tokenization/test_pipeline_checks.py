"""Pipelines that fill any memory or take any time with a short text are refused when the tokenizer is loaded."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from quire.errors import ModelLoadError
from quire.tokenization.pipeline_checks import LONGEST_WORD, check_growth
from quire.tokenization.tokenizer import Tokenizer as Loaded
from quire.tokenization.tokenizer import load_tokenizer
from tests.tokenization.build import byte_level, byte_level_backend
from tests.tokenization.reference_pieces import charsmap

Change = Callable[[Tokenizer], object]


def normalizer(*steps: normalizers.Normalizer) -> Change:
    return lambda backend: setattr(backend, "normalizer", normalizers.Sequence(list(steps)))


def pre_tokenizer(*steps: pre_tokenizers.PreTokenizer) -> Change:
    return lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Sequence(list(steps)))


def template(single: str) -> Change:
    made = processors.TemplateProcessing(single=single, special_tokens=[("</s>", 1)])
    return lambda backend: setattr(backend, "post_processor", made)


BLANKS = normalizers.Replace(Regex(" {2,}"), " ")
LETTERS = pre_tokenizers.ByteLevel(use_regex=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (normalizer(*[normalizers.ByteLevel()] * 4), "normalizer has 4 steps that may make a text 256 times as long"),
        (normalizer(*[normalizers.Replace("a", "aa")] * 7), "normalizer has 7 steps that may make a text 128 times"),
        (normalizer(*[normalizers.Precompiled(charsmap({"a": "a" * 9}))] * 2), "normalizer has 2 steps .* 81 times"),
        (normalizer(*[BLANKS] * 65), "normalizer has 65 steps"),
        (pre_tokenizer(*[LETTERS] * 4), "pre_tokenizer has 4 steps that may make a text 256 times as long"),
        (pre_tokenizer(*[pre_tokenizers.Digits()] * 65), "pre_tokenizer has 65 steps"),
        (template("$A" + " </s>" * 70), "post_processor has 1 steps of 73 parts, and puts 70 tokens around a text"),
        (template(" ".join(["$A"] * 70)), "post_processor has 1 steps of 72 parts"),
    ],
)
def test_pipelines_that_grow_without_end(tmp_path: Path, change: Change, message: str) -> None:
    backend = byte_level_backend()
    change(backend)
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(tmp_path)


def test_usual_pipelines_do_not() -> None:
    backend = byte_level_backend()
    table = charsmap({"ﷺ": "صلى الله عليه وسلم"})  # the longest of Unicode's compatibility forms
    normalizer(normalizers.Precompiled(table), BLANKS, normalizers.Replace(Regex(r"\s+"), " "))(backend)
    pre_tokenizer(pre_tokenizers.Digits(), LETTERS)(backend)
    template("</s> $A </s>")(backend)
    check_growth(backend)


@pytest.mark.parametrize(("longest", "is_taken"), [(LONGEST_WORD, True), (LONGEST_WORD + 1, False)])
def test_words_that_wordpiece_takes_apart(tmp_path: Path, longest: int, is_taken: bool) -> None:
    model = models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]", max_input_chars_per_word=longest)
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    if is_taken:
        load_tokenizer(tmp_path)
        return
    with pytest.raises(ModelLoadError, match="max_input_chars_per_word is 257; 256 are allowed"):
        load_tokenizer(tmp_path)


def test_a_table_of_characters_that_says_it_is_longer(tmp_path: Path) -> None:
    table = base64.b64encode(b"\xff\xff\xff\x7f").decode()
    step = {"type": "Precompiled", "precompiled_charsmap": table}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": step}))
    with pytest.raises(ModelLoadError, match="precompiled_charsmap is shorter than it says"):
        load_tokenizer(tmp_path)


def test_patterns_of_published_models_are_known() -> None:
    assert not byte_level().has_own_patterns
    backend = byte_level_backend()
    known = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    for pattern, is_own in ((known + r"|\s+(?!\S)|\s+", False), (r"\s+", False), (r"(?<=b)a|a(?=a*c)", True)):
        pre_tokenizer(pre_tokenizers.Split(Regex(pattern), behavior="isolated"), LETTERS)(backend)
        assert Loaded(backend).has_own_patterns == is_own, pattern
