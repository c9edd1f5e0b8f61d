"""Limits on entries of a tokenizer's files, checked before the library reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from quire.errors import ModelLoadError

LARGEST_VOCABULARY = 2**18
"""Default vocabulary size of the model: Gemma's."""
NUM_OTHER_TOKENS = 2**15
"""Tokens allowed beyond the model's vocabulary."""
VALUES_PER_TOKEN = 6
"""Values per token: one for the token (two with a score), two for each merge."""
MAX_TOKENIZER_VALUES = 2**21
"""Maximum values in a file for any vocabulary: a million tokens with scores."""
LONGEST_PIECE = 512
"""Maximum characters in an entry; in byte-level vocabularies one per byte."""
MAX_PATTERN = 2**14
"""Maximum characters in a regular expression or other text that is not an entry."""
_STEP_TEXT = re.compile(rb'"(Regex|String|precompiled_charsmap)"\s*:\s*$')
"""Key before a step's text. Character tables have a check of their own."""


def max_values(vocab_size: int | None) -> int:
    """Maximum values (entries, merges) in a tokenizer's file. vocab_size: the model's, if known."""
    num_tokens = (LARGEST_VOCABULARY if vocab_size is None else vocab_size) + NUM_OTHER_TOKENS
    return min(MAX_TOKENIZER_VALUES, VALUES_PER_TOKEN * num_tokens)


def count_values(content: bytes, *, is_text: bool) -> int:
    """Count before parsing: lower bound of the values in a JSON text, from its commas; for merges.txt (`is_text`), two
    per line."""
    return 2 * content.count(b"\n") if is_text else content.count(b",")


def check_num_values(file: Path, num_values: int, limit: int) -> None:
    if num_values > limit:
        raise ModelLoadError(
            f"{file} holds some {num_values} values of vocabulary and merges; {limit} are allowed with this model's "
            f"vocab_size ({VALUES_PER_TOKEN} for each token, and for {NUM_OTHER_TOKENS} added ones)"
        )


def check_pieces(where: object, pieces: Iterable[str]) -> None:
    """Raise ModelLoadError for an entry of more than LONGEST_PIECE characters."""
    longest = max(pieces, key=len, default="")
    if len(longest) > LONGEST_PIECE:
        raise _too_long(where, longest)


def check_text_lengths(file: Path, content: bytes) -> None:
    """Raise ModelLoadError for too long a text in a JSON file or merges.txt. The time does not depend on the number of
    texts."""
    if file.suffix == ".txt":
        for start, end in _long_runs(content, b"\n", LONGEST_PIECE):
            _check_merge(file, content[start:end].decode(errors="replace"))
        return
    # Escaped quotes and backslashes inside a text do not delimit it.
    plain = content.replace(b"\\\\", b"xx").replace(b'\\"', b"xx")
    num_quotes, counted = 0, 0
    for start, end in _long_runs(plain, b'"', LONGEST_PIECE):
        num_quotes += plain.count(b'"', counted, start)
        counted = start
        if num_quotes % 2 == 0:
            continue  # numbers and spaces between two texts
        step = _STEP_TEXT.search(plain, max(0, start - 64), start - 1)
        if step is None:
            try:
                text = json.loads(content[start - 1 : end + 1])
            except ValueError:
                text = content[start:end].decode(errors="replace")
            _check_merge(file, text)
        elif step[1] != b"precompiled_charsmap" and end - start > MAX_PATTERN:
            raise ModelLoadError(f"{file}: a pattern has {end - start} bytes, more than {MAX_PATTERN}")


def _check_merge(file: Path, text: str) -> None:
    parts = text.split(" ")
    check_pieces(file, parts if len(parts) == 2 else [text])


def _long_runs(content: bytes, mark: bytes, length: int) -> Iterator[tuple[int, int]]:
    start = 0
    while start + length < len(content):
        last = content.rfind(mark, start, start + length + 1)
        if last >= 0:
            start = last + 1
            continue
        end = content.find(mark, start)
        end = len(content) if end < 0 else end
        yield start, end
        start = end + 1


def _too_long(where: object, piece: str) -> ModelLoadError:
    return ModelLoadError(
        f"{where}: the entry {piece[:32]!r}... has {len(piece)} characters, more than {LONGEST_PIECE}"
    )
