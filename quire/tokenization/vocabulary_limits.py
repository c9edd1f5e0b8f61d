"""How many entries a tokenizer's files may hold, and how long each may be.

The `tokenizers` library takes up to 406 bytes for each value of a file, and a value may be written in two: the size of
the file says little about the memory that loading it takes, while the number of its values says it all. They are
counted before the library gets the file. Its trees of entries are as deep as the longest one, and end the process that
takes one apart which is too deep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
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
LONGEST_PIECE = 512
"""Characters of an entry, in byte-level vocabularies one for each byte."""
MAX_PATTERN = 2**14
"""Characters of a regular expression, and of other texts that are no entry."""
_STEP_TEXT = re.compile(rb'"(Regex|String|precompiled_charsmap)"\s*:\s*$')
"""Before the texts of steps, among them the table of characters, which has a check of its own."""


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


def check_pieces(where: object, pieces: Iterable[str]) -> None:
    """Raises ModelLoadError for an entry of more than LONGEST_PIECE characters. where: what errors name."""
    longest = max(pieces, key=len, default="")
    if len(longest) > LONGEST_PIECE:
        raise _too_long(where, longest)


def check_text_lengths(file: Path, content: bytes) -> None:
    """Raises ModelLoadError for a JSON file, or merges.txt, with a text that is longer than an entry may be. The time
    does not depend on the number of texts."""
    if file.suffix == ".txt":
        for start, end in _long_runs(content, b"\n", LONGEST_PIECE):
            _check_merge(file, content[start:end].decode(errors="replace"))
        return
    # What stands for a quote or a backslash inside a text does not count as either.
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
    """An entry, or two with a space between them as old files write a merge."""
    parts = text.split(" ")
    check_pieces(file, parts if len(parts) == 2 else [text])


def _long_runs(content: bytes, mark: bytes, length: int) -> Iterator[tuple[int, int]]:
    """Starts and ends of the runs of more than `length` bytes without `mark`. Few places of the others are looked at:
    the last mark of each `length` bytes."""
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
