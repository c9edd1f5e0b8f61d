"""Prompts for infilling."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors

from quire.errors import UserError
from quire.tokenization.infill import FAMILIES, SUFFIX, TEXT, infill
from quire.tokenization.tokenizer import Tokenizer


def tokenizer_with(*special: str) -> Tokenizer:
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<s>", *special])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return Tokenizer(backend)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_texts_stand_between_the_familys_tokens(family: tuple[str, ...]) -> None:
    marks = [part for part in family if part not in (TEXT, SUFFIX)]
    tokenizer = tokenizer_with(*marks)
    a, b = (tokenizer.encode(text, add_special_tokens=False) for text in ("def f(", ")"))
    if len(marks) == 3:
        assert infill(tokenizer, "def f(", ")") == [256, 257, *a, 258, *b, 259]
        assert infill(tokenizer, "", ")", add_special_tokens=False) == [257, 258, *b, 259]
    else:
        assert infill(tokenizer, "def f(", ")") == [256, 257, *b, 258, *a]
        assert infill(tokenizer, "", ")", add_special_tokens=False) == [257, *b, 258]


def test_a_suffix_gets_no_space_in_front_of_it() -> None:
    """CodeLlama's tokenizer begins each text with a space, which a suffix must not have."""
    vocab = {char: index for index, char in enumerate("\u2581abc(): \u263a")}
    backend = Backend(models.BPE(vocab, [], fuse_unk=False, byte_fallback=False))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.add_special_tokens(["\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"])
    tokenizer = Tokenizer(backend)
    pre, suf, mid = (tokenizer.token_to_id(f"\u2581<{name}>") for name in ("PRE", "SUF", "MID"))
    space, a, b = vocab["\u2581"], vocab["a"], vocab["b"]
    assert infill(tokenizer, "a", "b b") == [pre, space, a, suf, b, space, b, mid]


def test_a_tokenizer_without_them() -> None:
    with pytest.raises(UserError, match="trained to infill") as caught:
        infill(tokenizer_with("<|fim_prefix|>", "<|fim_suffix|>"), "a", "b")
    assert caught.value.param == "suffix"
