"""What is not refused is followed to its end: no text that another library finds wrong is taken, and none stops in the
middle."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher

from quire.errors import UserError
from quire.structured_output.grammar import write_grammar
from quire.structured_output.rehearsal import start_matcher
from quire.structured_outputs_params import StructuredOutputsParams
from tests.long import one_in
from tests.structured_output.bytes_matcher import VOCABULARY, takes
from tests.structured_output.wild_schemas import validator, wild_document, wild_value

NUM_SCHEMAS, PARTS = 600, 4
SOFT_LENGTH, HARD_LENGTH = 60, 400


def started(schema: Any) -> LLMatcher | None:
    """None: refused before the first token."""
    try:
        grammar = write_grammar(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    except UserError:
        return None
    found = start_matcher(VOCABULARY, grammar)
    return None if found.is_error() else found


def drawn(start: LLMatcher, rng: random.Random) -> str | None:
    """A text of allowed bytes; None where it became too long. Raises AssertionError where nothing could follow."""
    state, found = start.deep_copy(), bytearray()
    while len(found) < HARD_LENGTH:
        mask = state.compute_bitmask()
        if state.is_error():
            return None  # limits of llguidance, which are not the schema's
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if state.is_accepting() and (not allowed or len(found) > SOFT_LENGTH or rng.random() < 0.3):
            return found.decode()
        assert allowed, found
        ends = [byte for byte in allowed if byte in b'"}]' or (byte in b"0:,{[" and len(found) < SOFT_LENGTH)]
        found.append(rng.choice(ends if ends and rng.random() < 0.5 else allowed))
        assert state.consume_token(found[-1])
    return None


def escaped(text: str, value: Any) -> str:
    """The text with its first name in another spelling."""
    name = next(iter(value))
    other = "".join(f"\\u{ord(character):04x}" for character in name)
    return text.replace(json.dumps(name, ensure_ascii=False), f'"{other}"', 1)


@pytest.mark.parametrize("part", one_in(2, range(PARTS)))
def test_nothing_wrong_is_taken(part: int) -> None:
    num_followed = num_taken = 0
    for seed in range(part * NUM_SCHEMAS // PARTS, (part + 1) * NUM_SCHEMAS // PARTS):
        schema, rng = wild_document(seed), random.Random(seed)
        start, reference = started(schema), validator(schema)
        if start is None:
            continue
        num_followed += 1
        texts = [text for _ in range(3) if (text := drawn(start, rng)) is not None]
        for _ in range(15):
            value = wild_value(rng)
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            texts += [text, escaped(text, value)] if value and isinstance(value, dict) else [text]
        for text in texts:
            if takes(start, text):
                num_taken += 1
                with contextlib.suppress(RecursionError):  # the library follows a reference that leads to itself
                    assert reference.is_valid(json.loads(text)), (schema, text)
    assert num_followed > 0.3 * NUM_SCHEMAS / PARTS
    assert num_taken > NUM_SCHEMAS / PARTS
