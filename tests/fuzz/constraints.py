"""Constraints of structured outputs: schemas, expressions and grammars with random edits.

The promises: every constraint compiles or is refused with one clear error, and what compiles allows at least one token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.errors import UserError
from quire.structured_outputs_params import StructuredOutputsParams
from quire.tokenization.tokenizer import load_tokenizer
from tests.fuzz.harness import Attack, Fuzzer
from tests.structured_output.schemas import Sampler, random_document
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


def drawn(sampler: Sampler, params: StructuredOutputsParams, seed: int) -> str:
    """Draw a text; returns why that failed: llguidance gives up in the middle, or no token continues the text."""
    try:
        sampler.draw(params, seed)
    except UserError as error:
        return error.message
    return ""


@contextmanager
def target() -> Iterator[Attack]:
    sampler = Sampler(load_tokenizer("bundled"), [0])

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
            params = StructuredOutputsParams(**fields)
            sampler.compiler.compile(params)
        except UserError as error:
            refused = error.message
        else:
            refused = drawn(sampler, params, rng.randint(0, 2**32))
        if "\n" in refused:
            raise AssertionError(refused)

    try:
        yield attack
    finally:
        sampler.close()


FUZZER = Fuzzer("constraints", target, num_test_cases=60)
