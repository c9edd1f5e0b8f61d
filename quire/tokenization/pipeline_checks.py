"""What a tokenizer's steps may do to a text's length.

Each step of a normalizer or decoder is harmless; forty that write every character twice fill any memory with one word.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

from quire.errors import ModelLoadError

MAX_STEPS = 64
MAX_GROWTH = 64
"""Times that a text may become longer: Metaspace writes three bytes for one."""
MAX_INSERTED = 256
"""Characters that a step may write at once."""

_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"]*)"')


def check_charsmaps(content: bytes) -> None:
    """Raises ModelLoadError for a tokenizer.json with a table of characters whose first four bytes, its length, say
    more than there is: the library takes memory for what they say, or ends the process."""
    for match in _CHARSMAP.finditer(content):
        try:
            table = base64.b64decode(match[1].replace(b"\\/", b"/"), validate=True)
        except binascii.Error as error:
            raise ModelLoadError(f"its precompiled_charsmap is no base64: {error}") from None
        check_charsmap(table)


def check_charsmap(table: bytes) -> None:
    """Raises ModelLoadError for a table of characters that says it is longer than it is."""
    if len(table) < 4 or int.from_bytes(table[:4], "little") > len(table) - 4:
        raise ModelLoadError("its precompiled_charsmap is shorter than it says")


def check_growth(backend: tokenizers.Tokenizer) -> None:
    """Raises ModelLoadError for a normalizer or a decoder that makes texts longer than MAX_GROWTH times."""
    for what, part in (("normalizer", backend.normalizer), ("decoder", backend.decoder)):
        steps = [] if part is None else list(_steps(json.loads(part.__getstate__())))
        growth = 1.0
        for step in steps:
            growth *= max(1.0, _growth(step, what))
        if len(steps) > MAX_STEPS or growth > MAX_GROWTH:
            raise ModelLoadError(
                f"its {what} has {len(steps)} steps that may make a text {growth:g} times as long; {MAX_STEPS} steps "
                f"and {MAX_GROWTH} times are allowed"
            )


def _growth(step: dict[str, Any], what: str) -> float:
    """How many characters stand at most for one."""
    inserted = step.get("content") if step["type"] == "Replace" else step.get("prepend")
    if not isinstance(inserted, str):
        return 1.0
    if len(inserted) > MAX_INSERTED:
        raise ModelLoadError(f"its {what} writes {len(inserted)} characters at once; {MAX_INSERTED} are allowed")
    if step["type"] != "Replace":
        return 1.0
    pattern = step.get("pattern", {}).get("String")
    if pattern:
        return len(inserted) / len(pattern)
    return 1.0 + len(inserted)  # a regular expression may match nothing, before each character


def _steps(description: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Nested sequences laid out flat."""
    if description.get("type") != "Sequence":
        yield description
        return
    for part in description.get("normalizers", description.get("decoders", [])):
        yield from _steps(part)
