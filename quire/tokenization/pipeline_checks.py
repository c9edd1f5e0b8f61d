"""Limits on the length and time that a tokenizer's steps may add."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import tokenizers

from quire.errors import ModelLoadError

MAX_STEPS = 64
MAX_GROWTH = 64
"""Maximum growth factor of a text."""
MAX_INSERTED = 256
"""Maximum characters that a step writes at once."""
MAX_ADDED_TOKENS = 64
"""Maximum tokens around a text, and of the parts that place them."""
LONGEST_WORD = 256
"""Maximum characters in a word that WordPiece splits (`max_input_chars_per_word`; usually 100)."""
_LETTERS_PER_CHARACTER = 4
_NEVER_EMPTY = re.compile(r"(?:\\s| |\[[^\]\[\\^]+\])(?:\+|\{[1-9]\d*,\})?")
"""Patterns of runs of blanks, which most tokenizers have."""
_INNER = ("normalizers", "decoders", "pretokenizers", "processors")

_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"]*)"')


def check_charsmaps(content: bytes) -> None:
    """Raise ModelLoadError for a tokenizer.json with a truncated character table."""
    for match in _CHARSMAP.finditer(content):
        try:
            table = base64.b64decode(match[1].replace(b"\\/", b"/"), validate=True)
        except binascii.Error as error:
            raise ModelLoadError(f"its precompiled_charsmap is no base64: {error}") from None
        check_charsmap(table)


def check_charsmap(table: bytes) -> None:
    if len(table) < 4 or int.from_bytes(table[:4], "little") > len(table) - 4:
        raise ModelLoadError("its precompiled_charsmap is shorter than it says")


def check_growth(backend: tokenizers.Tokenizer) -> None:
    """Raise ModelLoadError for a pipeline that lengthens texts beyond MAX_GROWTH times, or adds more than
    MAX_ADDED_TOKENS."""
    parts = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer, "decoder": backend.decoder}
    for what, part in parts.items():
        steps = [] if part is None else list(_steps(json.loads(part.__getstate__())))
        growth = 1.0
        for step in steps:
            growth *= max(1.0, _growth(step, what))
        if len(steps) > MAX_STEPS or growth > MAX_GROWTH:
            raise ModelLoadError(
                f"its {what} has {len(steps)} steps that may make a text {growth:g} times as long; {MAX_STEPS} steps "
                f"and {MAX_GROWTH} times are allowed"
            )
    processor = backend.post_processor
    steps = [] if processor is None else list(_steps(json.loads(processor.__getstate__())))
    num_parts = sum(len(step.get(side) or ()) for step in steps for side in ("single", "pair"))
    num_added = max(backend.num_special_tokens_to_add(is_pair) for is_pair in (False, True))
    if max(len(steps), num_parts, num_added) > MAX_ADDED_TOKENS:
        raise ModelLoadError(
            f"its post_processor has {len(steps)} steps of {num_parts} parts, and puts {num_added} tokens around a "
            f"text; {MAX_ADDED_TOKENS} are allowed"
        )


def check_word_length(backend: tokenizers.Tokenizer) -> None:
    """Raise ModelLoadError for a WordPiece vocabulary that splits words of more than LONGEST_WORD characters."""
    model = backend.model
    if isinstance(model, tokenizers.models.WordPiece) and model.max_input_chars_per_word > LONGEST_WORD:
        raise ModelLoadError(
            f"its max_input_chars_per_word is {model.max_input_chars_per_word}; {LONGEST_WORD} are allowed"
        )


def other_patterns(backend: tokenizers.Tokenizer, known: Collection[str]) -> frozenset[str]:
    """Regular expressions of all steps, except `known` ones and runs of blanks."""
    found = set()
    for part in (backend.normalizer, backend.pre_tokenizer, backend.decoder):
        for step in [] if part is None else _steps(json.loads(part.__getstate__())):
            pattern = step.get("pattern")
            if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
                found.add(pattern["Regex"])
    return frozenset(each for each in found if each not in known and not _NEVER_EMPTY.fullmatch(each))


def _growth(step: dict[str, Any], what: str) -> float:
    """Maximum growth factor of a step, in characters."""
    kind = step["type"]
    if kind == "ByteLevel":
        return 1.0 if what == "decoder" else _LETTERS_PER_CHARACTER
    if kind == "Precompiled":
        table = base64.b64decode(step["precompiled_charsmap"])
        replacements = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return float(max(len(each.decode(errors="replace")) for each in replacements))
    inserted = step.get("content") if kind == "Replace" else step.get("prepend")
    if not isinstance(inserted, str):
        return 1.0
    if len(inserted) > MAX_INSERTED:
        raise ModelLoadError(f"its {what} writes {len(inserted)} characters at once; {MAX_INSERTED} are allowed")
    if kind != "Replace":
        return 1.0
    pattern = step.get("pattern", {}).get("String")
    if pattern:
        return len(inserted) / len(pattern)
    if _NEVER_EMPTY.fullmatch(step.get("pattern", {}).get("Regex", "")):
        return len(inserted)
    return 1.0 + len(inserted)  # a regular expression may match the empty text before each character


def _steps(description: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if description.get("type") != "Sequence":
        yield dict(description)
        return
    for part in next((description[name] for name in _INNER if name in description), ()):
        yield from _steps(part)
