"""Grammars in EBNF allow at least what llguidance's converter makes of them."""

from __future__ import annotations

import random

import pytest
from llguidance.gbnf_to_lark import gbnf_to_lark

from quire.structured_output import grammar
from quire.structured_output.ebnf import is_ebnf, quoted, to_lark
from tests.structured_output.bytes_matcher import matcher, takes

ATOMS = ['"a"', '"ab"', "[ab]", "[^a]", "[a-c]", '"\\n"', '"\\""', "[\\]x]", '"\\x62"', "[\\x61]", '"/"', "[/a]"]
LETTERS = 'abc\n"x]/'


def random_grammar(rng: random.Random) -> str:
    # Each rule refers to later ones, and one to itself.
    num_rules = rng.randint(1, 4)
    lines = []
    for number in range(num_rules):
        later = [f"rule-{other}" for other in range(number + 1, num_rules)]
        options = [" ".join(element(rng, later) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 2))]
        if number == 1 and rng.random() < 0.5:
            options.append('"(" rule-1 ")"')
        name = "root" if number == 0 else f"rule-{number}"
        comment = " # a remark\n" if rng.random() < 0.2 else "\n"
        lines.append(f"{name} ::= {' | '.join(options)}{comment}")
    return "".join(lines)


def element(rng: random.Random, names: list[str], depth: int = 0) -> str:
    if depth < 2 and rng.random() < 0.2:
        found = f"( {element(rng, names, depth + 1)} | {element(rng, names, depth + 1)} )"
    else:
        found = rng.choice([*ATOMS, *names, *names])
    return found + rng.choice(["", "", "", "?", "*", "+", "{1,2}", "{2}", "{1,}"])


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS + "()", k=rng.randint(0, 5)))


def test_random_grammars_allow_at_least_the_same() -> None:
    num_taken = 0
    for seed in range(250):
        rng = random.Random(seed)
        text = random_grammar(rng)
        ours, theirs = matcher(grammar.lark_grammar(to_lark(text))), matcher(gbnf_to_lark(text))
        for _ in range(30):
            example = random_text(rng)
            assert takes(ours, example) >= takes(theirs, example), (text, example)
            num_taken += takes(ours, example)
    assert num_taken > 300


@pytest.mark.parametrize(
    ("text", "taken", "not_taken"),
    [
        ('root ::= "a"\n  | "b"\n  | x\nx ::= "c"', ["a", "b", "c"], ["", "ab"]),
        ('root ::= ("a" |\n "b"){2}', ["ab", "ba"], ["a"]),
        ('root ::= "a" "b"?\nunused ::= "x" root', ["a", "ab"], ["b"]),
        ('# first\nroot ::= a-B # "x"\na-B ::= "y" |', ["y", ""], ["x"]),
        ("root ::= .+", ["a\nb"], [""]),
        ('root ::= [a\\-c] [x-] "\\U0001f600"', ["-x😀", "c-😀"], ["bx😀"]),
        ('root ::= "\\x7f" "\x7f"', ["\x7f\x7f"], ["\x7f"]),
    ],
)
def test_syntax(text: str, taken: list[str], not_taken: list[str]) -> None:
    found = matcher(grammar.lark_grammar(to_lark(text)))
    assert all(takes(found, each) for each in taken)
    assert not any(takes(found, each) for each in not_taken)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("root ::= (", "not closed"),
        ('root ::= "a', "ends"),
        ("root ::= [a", "ends"),
        ("root ::= b", "no rule"),
        ('x ::= "a"', "no rule root"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ('root ::= "\\q"', "no escape"),
        ('root ::= "a"\n)', "line 2"),
        ("root ::= " + "(" * 200, "levels"),
        ("root ::= [b-a]", "empty"),
        ('root ::= "\\ud800"', "no character"),
    ],
)
def test_errors_name_the_line(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        to_lark(text)


def test_a_long_chain_of_rules_is_no_recursion() -> None:
    rules = [f"r{number} ::= r{number + 1}" for number in range(3000)]
    found = to_lark("\n".join(["root ::= r0", *rules, 'r3000 ::= "a"']))
    assert found.count("\n") == 3004


def test_which_grammars_are_ebnf() -> None:
    assert is_ebnf('# c\n root ::= "a"')
    assert not is_ebnf('start: "a ::= b"')


def test_every_character_is_a_literal() -> None:
    characters = [chr(code) for code in (*range(0x800), 0x2028, 0xFEFF, 0xFFFF, 0x1F600)]
    found = matcher("start: " + " ".join(map(quoted, characters)))
    assert takes(found, "".join(characters))
