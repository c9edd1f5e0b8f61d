"""Infilling: the prompt of a model that was trained to write what stands between a text and a suffix.

Such models mark the two texts with special tokens of their own; a tokenizer that has a family's tokens is of it.
Families whose tokenizers put spaces in front of texts (CodeLlama, Codestral) are left out: their texts need a tokenizer
that does not.
"""

from __future__ import annotations

from quire.errors import UserError
from quire.tokenization.tokenizer import Tokenizer

FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma, later Granites
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code models
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    (
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
    ),  # DeepSeek-Coder and V3
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
"""The tokens before the text, before the suffix, and before what the model writes."""


def infill(tokenizer: Tokenizer, text: str, suffix: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids that ask for what stands between `text` and `suffix`.

    add_special_tokens: begin with what the tokenizer puts before any text, such as a beginning-of-sequence token.
    Raises UserError for a tokenizer without tokens for infilling.
    """
    for family in FAMILIES:
        marks = [tokenizer.token_to_id(mark) for mark in family]
        if None not in marks:
            break
    else:
        raise UserError(
            "suffix needs a model that was trained to infill: this one's tokenizer has no tokens for it", param="suffix"
        )
    before, between, middle = (mark for mark in marks if mark is not None)
    first = _beginning(tokenizer) if add_special_tokens else []
    texts = [tokenizer.encode(part, add_special_tokens=False) for part in (text, suffix)]
    return [*first, before, *texts[0], between, *texts[1], middle]


def _beginning(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before a text."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    starts = range(len(whole) - len(plain) + 1)
    return next((whole[:start] for start in starts if whole[start : start + len(plain)] == plain), [])
