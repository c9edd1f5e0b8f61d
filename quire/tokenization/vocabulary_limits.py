"""How many entries a tokenizer's files may hold.

The `tokenizers` library takes up to 406 bytes for each value of a file, and a value may be written in two: the size of
the file says little about the memory that loading it takes, while the number of its values says it all. They are
counted before the library gets the file.
"""

from __future__ import annotations

from pathlib import Path

from quire.errors import ModelLoadError

LARGEST_VOCABULARY = 2**18
"""Entries, where the model that the tokenizer is for is not known: those of Gemma."""
NUM_OTHER_TOKENS = 2**15
"""Tokens that a tokenizer may have beyond the model's vocabulary: added ones, and small models that were given the
tokenizer of a larger one."""
VALUES_PER_TOKEN = 6
"""One for a token of the vocabulary (two with its score), two for each merge, of which the families that were converted
from sentencepiece have 2.3 for each token."""
MAX_TOKENIZER_VALUES = 2**21
"""In one file, whatever the model's vocabulary: a million tokens with their scores."""


def max_values(vocab_size: int | None) -> int:
    """Most values of one file. vocab_size: of the model, None where it is not known."""
    num_tokens = (LARGEST_VOCABULARY if vocab_size is None else vocab_size) + NUM_OTHER_TOKENS
    return min(MAX_TOKENIZER_VALUES, VALUES_PER_TOKEN * num_tokens)


def count_values(content: bytes, *, is_text: bool) -> int:
    """At least the number of values in a JSON text, where a comma stands between any two; of merges.txt (`is_text`)
    the tokens of its lines, two in each."""
    return 2 * content.count(b"\n") if is_text else content.count(b",")


def check_num_values(file: Path, num_values: int, limit: int) -> None:
    """Raises ModelLoadError for more than `limit` values."""
    if num_values > limit:
        raise ModelLoadError(
            f"{file} holds some {num_values} values of vocabulary and merges; {limit} are allowed with this model's "
            f"vocab_size ({VALUES_PER_TOKEN} for each token, and for {NUM_OTHER_TOKENS} added ones)"
        )
