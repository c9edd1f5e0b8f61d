"""Expressions of schemas: the same language in Rust's syntax, and names that they match."""

from __future__ import annotations

import random
import re

import pytest

from quire.structured_output.patterns import Budget, Languages, PatternMatcher, num_words, parse, written
from tests.structured_output.bytes_matcher import schema_matcher, takes


def random_expression(rng: random.Random, depth: int = 0) -> str:
    kind = rng.randint(0, 9)
    if depth > 3 or kind < 3:
        return rng.choice(["a", "b", "[ab]", "[^a]", ".", r"\d"])
    inner = random_expression(rng, depth + 1)
    if kind < 5:
        return inner + random_expression(rng, depth + 1)
    if kind < 7:
        return f"({inner}|{random_expression(rng, depth + 1)})"
    if kind < 9:
        return f"(?:{inner})" + rng.choice(["*", "+", "?", "{1,2}", "{2,}", "*?"])
    return rng.choice(["^", "$", ""]) + inner


def test_names_are_matched_as_python_matches_them() -> None:
    num_found = 0
    for seed in range(3000):
        rng = random.Random(seed)
        expression = random_expression(rng)
        name = "".join(rng.choices("ab1", k=rng.randint(0, 5)))
        expected = re.search(expression, name) is not None
        assert PatternMatcher(parse(expression), Budget()).is_found(name) == expected, (expression, name)
        num_found += expected
    assert 500 < num_found < 2900


def test_names_are_matched_without_backtracking() -> None:
    assert not PatternMatcher(parse("^(a*)*(a|a)*b$"), Budget()).is_found("a" * 300)


@pytest.mark.parametrize("expression", ["(a{60}){60}", "a{999999999}", "(){999999999}", "((){999}){999}"])
def test_large_expressions_end_with_an_error(expression: str) -> None:
    with pytest.raises(ValueError, match="too large"):
        PatternMatcher(parse(expression), Budget()).is_found("a" * 3000)


@pytest.mark.parametrize(
    ("pattern", "taken", "not_taken"),
    [
        ("^.$", ["é", "\t"], ["\n", "\r", "\u2028", ""]),
        ("^[[a]$", ["[", "a"], ["b"]),
        ("^[a&&b]$", ["a", "&", "b"], ["c"]),
        ("^[!--b]$", ["!", "+", "b"], ["c"]),
        (r"^\s$", ["\ufeff", "\u00a0"], ["\u0085", "x"]),
        (r"^\<\d\>$", ["<1>"], ["1"]),
        ("^a{b$", ["a{b"], ["ab"]),
        (r"^\u00e9\ud83d\ude00\x41\cJ$", ["é😀A\n"], ["é"]),
        ("^[^]$", ["\n"], [""]),
        (r"^\w+?\/$", ["ab/"], ["é/"]),
        ("^a|b$", ["ax", "xb"], ["xax"]),
        (r"^\p{Lu}[\p{N}-]$", ["Ä1", "A-"], ["a1"]),
        ("(?i)^ab$", ["AB"], ["c"]),
        (r"^[\b\]\\^-]$", ["\b", "]", "\\", "^", "-"], ["b"]),
        ("^(?<year>[0-9]{2})$", ["12"], ["1"]),
    ],
)
def test_languages(pattern: str, taken: list[str], not_taken: list[str]) -> None:
    import json

    found = schema_matcher({"type": "string", "pattern": pattern})
    assert all(takes(found, json.dumps(text, ensure_ascii=False)) for text in taken)
    assert not any(takes(found, json.dumps(text, ensure_ascii=False)) for text in not_taken)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"\bword", "boundary"),
        (r"(a)\1", "groups"),
        ("(a", "not closed"),
        ("a)", "closes nothing"),
        ("[a", "not closed"),
        ("*a", "repeats nothing"),
        ("a{3,1}", "counts down"),
        ("[z-a]", "counts down"),
        ("[]", "empty"),
        (r"\q", "no escape"),
        ("(" * 200, "levels"),
        ("a" * 2**17, "characters"),
    ],
)
def test_what_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        written(parse(pattern))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"^(?:\S+\s+){0,99}\S+$", 99),
        (r"^$|(^([a-z]+(-|\s+)){3}x{5})", 3),
        (r"^((\S+\s+){0,99}){0,7}$", 99),
        (r"^(\S+ ){0,99}\S+$", 0),
        (r"^(\S+\s+)*\S{1,50}$", 0),
        ("", 0),
    ],
)
def test_words_that_are_counted(pattern: str, expected: int) -> None:
    assert num_words(parse(pattern)) == expected


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^score$", {"score"}),
        ("^(a|b)c?$", {"a", "b", "ac", "bc"}),
        ("^a$|^[bc]{1,2}$", {"a", "b", "c", "bb", "bc", "cb", "cc"}),
        ("^a*$", None),
        ("a", None),
        ("^[^a]$", None),
        ("^((){1,9}){1,9}$", {""}),
    ],
)
def test_small_languages(pattern: str, texts: set[str] | None) -> None:
    assert Languages(20, 9, Budget()).of(parse(pattern)) == texts
