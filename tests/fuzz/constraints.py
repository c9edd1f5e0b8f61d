"""Constraints of structured outputs: schemas, expressions and grammars with random edits.

The promises: every constraint compiles or is refused with one clear error, no process of the engine ends, and what
compiles allows a token at each place, which it then takes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.errors import UserError
from quire.structured_output.service import ConstraintService
from tests.fuzz.harness import Attack, Fuzzer
from tests.structured_output.schemas import random_document
from tests.structured_output.services import VOCAB_SIZE, advance, make_service, start, text_of
from tests.structured_output.wild_schemas import EXPRESSIONS, wild_document

TEXTS = {
    "regex": ["[a-z]{1,3}(x|y)+", r"(\d+\.)*\w{2}", "((a{1,9}){1,9}){1,9}", r"[\x00-\xff]*", "(?i)straße", r"\p{L}+"],
    "grammar": [
        'start: a b*\na: "x" | b\nb: /[0-9]+/',
        'start: "(" start ")" | ""\n',
        'start: x[capture] %json {"type": "object"}\nx[lazy]: /.*/ "end"',
        'root ::= "a" [b-d]{2,3} | (root "," root)?\n',
        'root ::= item+ # c\n  | ("a" | [^"\\n])\nitem ::= "\\x41" [\\]-a] list-1? .\nlist-1 ::= item | ""',
        "start: <|im_start|> <[5]> /a/",
    ],
    "json": [
        '{"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}}',
        '{"allOf": [{"minLength": 2}, {"maxLength": 5}]}',
    ],
    "structural_tag": ['{"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}'],
}
CHARACTERS = "{}[]()|*+?.^$\\/\"':,;%@<>=~&!# \n\tax09é\x00\U0001f600"


def damaged(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(0, 4)):
        at = rng.randint(0, len(text))
        match rng.randint(0, 3):
            case 0:
                text = text[:at] + rng.choice(CHARACTERS) + text[at:]
            case 1:
                text = text[:at] + text[at + rng.randint(1, 4) :]
            case 2:
                text = text[:at] + text[rng.randint(0, len(text)) :]
            case _:
                text = text[:at] + str(rng.choice([0, 1, 65536, 10**12])) + text[at:]
    return text


def random_value(rng: random.Random, value: Any) -> Any:
    """A schema of which some parts have become something else."""
    if rng.random() < 0.05:
        return rng.choice([None, True, -1, 1e300, "x", [], {}, [{}], {"type": 5}])
    if isinstance(value, dict):
        return {key: random_value(rng, each) for key, each in value.items() if rng.random() > 0.03}
    return [random_value(rng, each) for each in value] if isinstance(value, list) else value


def drawn(service: ConstraintService, text: str, rng: random.Random) -> str:
    """Draw tokens under a constraint; returns why that failed: it does not compile, or the library gives up in the
    middle, or no token continues the text."""
    try:
        matcher = start(service, text)
        for _ in range(40):
            mask = None if matcher.error is not None else matcher.mask()
            if matcher.error is not None or matcher.is_finished:
                break
            assert mask is not None
            allowed = [token for token in range(VOCAB_SIZE) if mask[token // 8] >> token % 8 & 1]
            assert allowed, "a mask without a token"
            advance(service, matcher, rng.choice(allowed))
            assert matcher.error is not None or matcher.num_accepted == 1, "a mask allows a token that does not follow"
    except UserError as error:
        return error.message
    return "" if matcher.error is None else matcher.error.message


@contextmanager
def target() -> Iterator[Attack]:
    service = make_service()

    def attack(rng: random.Random) -> None:
        field = rng.choice([*TEXTS, "schema", "wild", "pattern"])
        if field == "schema":
            fields: dict[str, Any] = {"json": random_value(rng, random_document(rng.randint(0, 10**6)))}
        elif field == "wild":
            fields = {"json": random_value(rng, wild_document(rng.randint(0, 10**6)))}
        elif field == "pattern":
            pattern = damaged(rng.choice([*EXPRESSIONS, *TEXTS["regex"]]), rng)
            fields = {"json": {"type": "object", "properties": {"a1": {}}, "patternProperties": {pattern: {}}}}
        else:
            fields = {field: damaged(rng.choice(TEXTS[field]), rng)}
        try:
            text = text_of(**fields)
        except UserError as error:
            refused = error.message
        else:
            refused = drawn(service, text, rng)
        if "\n" in refused or "out of order" in refused:
            raise AssertionError(refused)

    try:
        yield attack
    finally:
        service.close()


FUZZER = Fuzzer("constraints", target, num_test_cases=60)
