"""Prompts for infilling."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from quire.errors import UserError
from quire.tokenization.infill import FAMILIES, infill
from quire.tokenization.tokenizer import Tokenizer


def tokenizer_with(*special: str) -> Tokenizer:
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<s>", *special])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return Tokenizer(backend)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_texts_stand_between_the_familys_tokens(family: tuple[str, str, str]) -> None:
    tokenizer = tokenizer_with(*family)
    a, b = (tokenizer.encode(text, add_special_tokens=False) for text in ("def f(", ")"))
    assert infill(tokenizer, "def f(", ")") == [256, 257, *a, 258, *b, 259]
    assert infill(tokenizer, "", ")", add_special_tokens=False) == [257, 258, *b, 259]


def test_a_tokenizer_without_them() -> None:
    with pytest.raises(UserError, match="trained to infill") as caught:
        infill(tokenizer_with("<|fim_prefix|>", "<|fim_suffix|>"), "a", "b")
    assert caught.value.param == "suffix"
