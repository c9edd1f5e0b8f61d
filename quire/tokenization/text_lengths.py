"""Limits of texts refused before tokenization."""

from __future__ import annotations

from quire.errors import PromptTooLongError
from quire.tokenization.tokenizer import Tokenizer

MAX_CHARACTERS_PER_TOKEN = 64
"""Maximum average; longer prompts are refused untokenized."""
MAX_CUT_CHARACTERS = 2**20
"""Limit for a text whose end `truncate_prompt_tokens` keeps, unless the context allows more."""
USUAL_CHARACTERS_PER_TOKEN = 8
UNCOUNTED_CHARACTERS = 2**18
"""Length up to which a text is tokenized at once, unless the context's is more."""
COUNTED_CHARACTERS = 2**16
"""Size of the pieces in which longer texts are counted first."""
SEAM_TOKENS = 1024
"""Extra tokens allowed per piece for its seams."""


def longest(max_model_len: int) -> str:
    """Beginning of length errors, in OpenAI's words, by which clients know them."""
    return f"this model's maximum context length is {max_model_len} tokens"


def check_num_characters(size: int, max_model_len: int, param: str, *, is_cut: bool = False) -> None:
    """Raise PromptTooLongError for a text of `size` characters that cannot fit. is_cut: only its last tokens are
    kept."""
    limit = max_model_len * MAX_CHARACTERS_PER_TOKEN
    if size > (max(limit, MAX_CUT_CHARACTERS) if is_cut else limit):
        raise _too_long(size, max_model_len, param)


def check_num_tokens(tokenizer: Tokenizer, text: str, max_model_len: int, param: str) -> None:
    """Raise PromptTooLongError for a text with far more tokens than fit. Long texts are counted piece by piece until
    they exceed the limit."""
    if len(text) <= max(UNCOUNTED_CHARACTERS, USUAL_CHARACTERS_PER_TOKEN * max_model_len):
        return
    num_tokens, most = 0, max_model_len
    for start in range(0, len(text), COUNTED_CHARACTERS):
        num_tokens += len(tokenizer.encode(text[start : start + COUNTED_CHARACTERS], add_special_tokens=False))
        most += SEAM_TOKENS
        if num_tokens > most:
            raise _too_long(len(text), max_model_len, param)


def _too_long(size: int, max_model_len: int, param: str) -> PromptTooLongError:
    return PromptTooLongError(
        f"{longest(max_model_len)}, far fewer than the prompt's {size} characters make", param=param
    )
