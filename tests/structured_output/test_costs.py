"""Costs of reading hostile schemas and patterns: in proportion to their length, or bounded by a budget. Lines of the
project's code are counted, and no time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from quire.errors import UserError
from quire.structured_output import lexemes, patterns, schema_joins
from quire.structured_output.grammar import write_grammar
from quire.structured_outputs_params import StructuredOutputsParams

FOLDER = str(Path(patterns.__file__).parent)
BIG = 2**60
STEPS = 20_000
"""Of each budget of a document, here."""
LIMIT = 20 * STEPS
"""Lines of a document whose budgets are used up."""


def num_lines(work: Callable[[], object]) -> int:
    """Lines that the project's reader of constraints runs."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except UserError:
        pass
    finally:
        sys.settrace(before)
    return count


def write(**fields: Any) -> str:
    return write_grammar(StructuredOutputsParams(disable_any_whitespace=True, **fields))


def named(pattern: str, name: str) -> dict[str, Any]:
    return {"json": {"type": "object", "properties": {name: {}}, "patternProperties": {pattern: {}}}}


def pattern_of(text: str) -> dict[str, Any]:
    return {"json": {"type": "string", "pattern": text}}


def one_of(options: list[Any]) -> dict[str, Any]:
    return {"json": {"oneOf": options}}


def told_apart(number: int, *more: str) -> dict[str, Any]:
    """An object with a constant of its own, and a number that makes the schema rules."""
    properties = {"kind": {"enum": [f"{number}_{each}" for each in range(20)]}, "size": {"minimum": BIG}}
    return {"type": "object", "required": [*more, "kind"], "properties": properties}


def with_a_name(number: int) -> dict[str, Any]:
    """An object that others are told from behind many names."""
    shared = [f"q{each}" for each in range(40)]
    properties = {**{name: {} for name in shared}, f"n{number}": {"minimum": BIG}}
    return {
        "type": "object",
        "required": [*shared, f"n{number}"],
        "properties": properties,
        "additionalProperties": False,
    }


FAMILIES: dict[str, Callable[[int], dict[str, Any]]] = {
    "characters": lambda n: pattern_of("a" * n),
    "dots": lambda n: pattern_of("." * n),
    "alternatives": lambda n: pattern_of("|".join("ab" for _ in range(n))),
    "empty alternatives": lambda n: pattern_of("|" * n),
    "nested": lambda n: pattern_of(("(" * 50 + "a" + ")*" * 50) * (n // 50)),
    "open": lambda n: pattern_of("(" * n),
    "open classes": lambda n: pattern_of("[" * n),
    "ranges": lambda n: pattern_of("[" + "".join(chr(0x4E00 + 2 * each) for each in range(n)) + "]"),
    "negated ranges": lambda n: pattern_of("[^" + "".join(chr(0x4E00 + 2 * each) for each in range(n)) + "]"),
    "counts": lambda n: pattern_of("a{1,99}" * n),
    "carets": lambda n: {"regex": "a^" * n},
    "classes": lambda n: {"regex": "[[]" * n},
    "escapes": lambda n: {"regex": "\\" * n},
    "rules": lambda n: {"grammar": "".join(f"r{each} ::= [^a]\n" for each in range(n))},
    "rules in a chain": lambda n: {
        "grammar": f"root ::= r1 | root\nr{n} ::= [a]\n"
        + "".join(f"r{each} ::= [^a] r{each + 1}\n" for each in range(1, n))
    },
    "loops of states": lambda n: named("(?:a?){200}b", "a" * n),
    "spellings": lambda n: {
        "json": {"patternProperties": {f"[{chr(97 + each % 26)}]{each}": {"minLength": 1} for each in range(n)}}
    },
    "constants": lambda n: {"json": {"enum": [BIG + each for each in range(n)]}},
    "properties": lambda n: {"json": {"properties": {f"n{each}": {"minimum": BIG} for each in range(n)}}},
    "conjunctions": lambda n: {"json": {"allOf": [{"minLength": each} for each in range(n)]}},
    "kinds": lambda n: one_of([told_apart(each) for each in range(n // 4)]),
    "kinds behind names": lambda n: one_of(
        [told_apart(each, *(f"q{name}" for name in range(30))) for each in range(n // 4)]
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_lines_grow_as_the_text(family: str) -> None:
    small, large = (num_lines(lambda size=size: write(**FAMILIES[family](size))) for size in (400, 800))  # type: ignore[misc]
    assert large < 2.3 * small + 2000


CLASS = "[" + "".join(chr(0x4E00 + 2 * each) for each in range(500)) + "]"
BOUNDED: dict[str, dict[str, Any]] = {
    "rules that follow one another": {
        "grammar": "root ::= "
        + " | ".join(f"r{each}" for each in range(150))
        + "\n"
        + "".join(f'r{each} ::= "x" root "y{each}"? | "z"\n' for each in range(150))
    },
    "rules of two of the next": {
        "grammar": 'root ::= "(" root ")" | r0 "b"\nr40 ::= "a"*\n'
        + "".join(f"r{each} ::= r{each + 1} r{each + 1}\n" for each in range(40))
    },
    "ranges times states": named(f"(?:{CLASS}?){{40}}b", "".join(chr(0x4E01 + 2 * each) for each in range(500))),
    "repetitions of repetitions": named("((((a{9}){9}){9}){9}){9}b", "a"),
    "repetitions of nothing": named("(?:){999999999}{999999999}b", "a"),
    "states times names, in each of many tags": {
        "structural_tag": json.dumps(
            {
                "format": {
                    "type": "or",
                    "elements": [
                        {
                            "type": "json_schema",
                            "json_schema": {"title": f"{each}", **named("(?:a?){300}b", "a" * 20)["json"]},
                        }
                        for each in range(60)
                    ],
                }
            }
        )
    },
    "states times names": {
        "json": {
            "type": "object",
            "properties": {"a" * each: {} for each in range(1, 300)},
            "patternProperties": {f"(?:a?){{500}}b{{{each}}}": {} for each in range(1, 20)},
        }
    },
}


@pytest.mark.parametrize("case", BOUNDED)
def test_lines_are_bounded_where_they_grow_faster(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns.Budget.__init__, "__defaults__", (STEPS,))
    monkeypatch.setattr(lexemes, "MAX_STEPS", STEPS // 2)
    assert num_lines(lambda: write(**BOUNDED[case])) < LIMIT


def test_comparisons_of_parts_that_are_kept_apart_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = one_of([with_a_name(each) for each in range(20)])
    write(**schema)
    monkeypatch.setattr(schema_joins, "MAX_COMPARISONS", 20 * 19 // 2 * 20)
    with pytest.raises(UserError, match="oneOf of as many parts"):
        write(**schema)


def test_one_object_stands_for_a_set_of_states() -> None:
    """Dictionaries compare the sets that are not the same object, state by state."""
    matcher = patterns.PatternMatcher(patterns.parse("(?:a?){50}b"), patterns.Budget())
    assert not matcher.is_found("a" * 1000)
    sets = [states for states, _ in matcher._moves]
    assert len({id(states) for states in sets}) == len(set(sets))


def test_characters_that_are_written_count_as_steps() -> None:
    budget = patterns.Budget()
    node = patterns.parse(f"^a{{{(length := 4000)}}}$")
    assert patterns.Languages(1, length, budget).of(node) == {"a" * length}
    num_written = length * length // 2
    assert patterns.MAX_STEPS - budget._num_steps > num_written // patterns.STEP_CHARACTERS
    with pytest.raises(ValueError, match="too large"):
        patterns.Languages(1, 10**6, patterns.Budget()).of(patterns.parse("^a{100000}$"))


@pytest.mark.parametrize("ranges", [((5, 9),), ((1, 1), (3, 7), (10, 10)), ((0, 0), (0x10FFFF, 0x10FFFF))])
def test_a_class_holds_the_characters_of_its_ranges(ranges: patterns.Ranges) -> None:
    edge = patterns.Characters(ranges, "")
    for code in (*range(12), 0x10FFFE, 0x10FFFF):
        assert patterns._holds(edge, code) == any(low <= code <= high for low, high in ranges)
