"""Infilling: prompts for models trained to write the text between a prefix and a suffix."""

from __future__ import annotations

from quire.errors import UserError
from quire.tokenization.tokenizer import Tokenizer

TEXT, SUFFIX = "text", "suffix"
FAMILIES = (
    ("<|fim_prefix|>", TEXT, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),  # Qwen-Coder, CodeGemma, later Granites
    ("<fim_prefix>", TEXT, "<fim_suffix>", SUFFIX, "<fim_middle>"),  # StarCoder, Granite code models
    ("<fim-prefix>", TEXT, "<fim-suffix>", SUFFIX, "<fim-middle>"),  # SantaCoder
    (
        "<\uff5cfim\u2581begin\uff5c>",
        TEXT,
        "<\uff5cfim\u2581hole\uff5c>",
        SUFFIX,
        "<\uff5cfim\u2581end\uff5c>",
    ),  # DeepSeek-Coder and V3
    ("<|code_prefix|>", TEXT, "<|code_suffix|>", SUFFIX, "<|code_middle|>"),  # GLM
    ("\u2581<PRE>", TEXT, "\u2581<SUF>", SUFFIX, "\u2581<MID>"),  # CodeLlama
    ("[SUFFIX]", SUFFIX, "[PREFIX]", TEXT),  # Codestral
)
"""Tokens of each family's prompts, with the places of text and suffix."""
_SPACE = "\u2581"
_OTHER = "\u263a"
"""Character that no token joins with others."""


def family_of(tokenizer: Tokenizer) -> tuple[str, ...] | None:
    """Parts of an infill prompt in order, tokens and the places TEXT and SUFFIX: the first of FAMILIES whose tokens the
    tokenizer has. None if the model does not infill."""

    def is_known(family: tuple[str, ...]) -> bool:
        return all(part in (TEXT, SUFFIX) or tokenizer.token_to_id(part) is not None for part in family)

    return next(filter(is_known, FAMILIES), None)


def infill(tokenizer: Tokenizer, text: str, suffix: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids that ask for the text between `text` and `suffix`.

    add_special_tokens: begin with the tokenizer's usual prefix, such as a beginning-of-sequence token. Raises UserError
        for a tokenizer without infilling tokens.
    """
    family = family_of(tokenizer)
    if family is None:
        raise UserError(
            "suffix needs a model that was trained to infill: this one's tokenizer has no tokens for it", param="suffix"
        )
    found = _beginning(tokenizer) if add_special_tokens else []
    for part in family:
        if part == TEXT:
            found += tokenizer.encode(text, add_special_tokens=False)
        elif part == SUFFIX:
            found += _encode_inside(tokenizer, suffix)
        elif (mark := tokenizer.token_to_id(part)) is not None:
            found.append(mark)
    return found


def _encode_inside(tokenizer: Tokenizer, text: str) -> list[int]:
    first = tokenizer.encode("a", add_special_tokens=False)[0]
    if not (tokenizer.backend.id_to_token(first) or "").startswith(_SPACE):
        return tokenizer.encode(text, add_special_tokens=False)
    before, whole = (tokenizer.encode(each, add_special_tokens=False) for each in (_OTHER, _OTHER + text))
    return whole[len(before) :]


def _beginning(tokenizer: Tokenizer) -> list[int]:
    plain, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    starts = range(len(whole) - len(plain) + 1)
    return next((whole[:start] for start in starts if whole[start : start + len(plain)] == plain), [])
