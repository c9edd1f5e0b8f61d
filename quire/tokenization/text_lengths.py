"""Texts that are refused before they are tokenised: that takes up to 300 times a text's size in memory."""

from __future__ import annotations

from quire.errors import PromptTooLongError
from quire.tokenization.tokenizer import Tokenizer

MAX_CHARACTERS_PER_TOKEN = 64
"""No text averages more: a prompt beyond it is rejected without spending seconds on its tokens."""
MAX_CUT_CHARACTERS = 2**20
"""Of a text of which `truncate_prompt_tokens` keeps the end, where the model's context does not allow more."""
USUAL_CHARACTERS_PER_TOKEN = 8
UNCOUNTED_CHARACTERS = 2**18
"""A text that has no more characters than these, or than the usual ones for the model's context, is tokenised whole."""
COUNTED_CHARACTERS = 2**16
"""Of the pieces in which the tokens of longer texts are counted first."""
SEAM_TOKENS = 1024
"""Tokens by which a piece and its neighbours may have more than the text there has."""


def longest(max_model_len: int) -> str:
    """The beginning of errors about length; clients know them by OpenAI's words, which these are."""
    return f"this model's maximum context length is {max_model_len} tokens"


def check_num_characters(text: str, max_model_len: int, param: str, *, is_cut: bool = False) -> None:
    """Raise PromptTooLongError for a text that is not worth the time and memory of its tokens. is_cut: only its
    last ones are wanted."""
    limit = max_model_len * MAX_CHARACTERS_PER_TOKEN
    if len(text) > (max(limit, MAX_CUT_CHARACTERS) if is_cut else limit):
        raise _too_long(text, max_model_len, param)


def check_num_tokens(tokenizer: Tokenizer, text: str, max_model_len: int, param: str) -> None:
    """Raise PromptTooLongError for a text that has far more tokens than fit. The tokens of its pieces are counted until
    they are too many, where the text has as many characters that they may be."""
    if len(text) <= max(UNCOUNTED_CHARACTERS, USUAL_CHARACTERS_PER_TOKEN * max_model_len):
        return
    num_tokens, most = 0, max_model_len
    for start in range(0, len(text), COUNTED_CHARACTERS):
        num_tokens += len(tokenizer.encode(text[start : start + COUNTED_CHARACTERS], add_special_tokens=False))
        most += SEAM_TOKENS
        if num_tokens > most:
            raise _too_long(text, max_model_len, param)


def _too_long(text: str, max_model_len: int, param: str) -> PromptTooLongError:
    return PromptTooLongError(
        f"{longest(max_model_len)}, far fewer than the prompt's {len(text)} characters make", param=param
    )
