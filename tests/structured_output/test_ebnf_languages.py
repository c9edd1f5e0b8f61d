"""Grammars in EBNF allow the texts of their language, as a plain chart parser tells them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.structured_output import ebnf, lexemes
from quire.structured_output.grammar import lark_grammar
from tests.structured_output.bytes_matcher import matcher, takes

ALPHABET = "abü"
RULES = ("root", "one", "two", "three")
Symbol = str | frozenset[str]
Part = tuple[Any, ...]


def written(part: Part) -> str:
    kind, *rest = part
    if kind == "text":
        return f'"{rest[0]}"'
    if kind == "class":
        return f"[{'^' if rest[1] else ''}{rest[0]}]"
    if kind == "rule":
        return str(rest[0])
    if kind == "repeated":
        return f"({written(rest[0])}){rest[1]}"
    return "(" + (" | " if kind == "choice" else " ").join(map(written, rest[0])) + ")"


@dataclass
class Plain:
    # Productions of single characters. A state of the chart: a name, the symbols to come, where it began.

    productions: dict[str, list[list[Symbol]]]

    @staticmethod
    def of(rules: dict[str, Part]) -> Plain:
        plain = Plain({})
        for name, part in rules.items():
            plain.productions[name] = [plain.symbols(part)]
        plain.drop_endless()
        return plain

    def new(self, options: Callable[[str], list[list[Symbol]]]) -> list[Symbol]:
        name = f"{len(self.productions)}"
        self.productions[name] = []
        self.productions[name] = options(name)
        return [name]

    def symbols(self, part: Part) -> list[Symbol]:
        kind, *rest = part
        if kind == "text":
            return [frozenset(each) for each in rest[0]]
        if kind == "class":
            return [frozenset(ALPHABET) - frozenset(rest[0]) if rest[1] else frozenset(rest[0])]
        if kind == "rule":
            return [rest[0]]
        if kind == "choice":
            return self.new(lambda _: [self.symbols(each) for each in rest[0]])
        if kind == "joined":
            return [symbol for each in rest[0] for symbol in self.symbols(each)]
        part, sign = rest
        body = self.symbols(part)
        if sign in "*+":
            return [*body * (sign == "+"), *self.new(lambda name: [[], [*body, name]])]
        low, high = {"?": (0, 1), "{2}": (2, 2), "{1,3}": (1, 3), "{0}": (0, 0)}[sign]
        return body * low + self.new(lambda _: [body * count for count in range(high - low + 1)])

    def drop_endless(self) -> None:
        good = set[str]()
        while found := {
            name
            for name, options in self.productions.items()
            if name not in good and any(self.can_end(option, good) for option in options)
        }:
            good |= found
        for name, options in self.productions.items():
            self.productions[name] = [option for option in options if self.can_end(option, good)]

    def can_end(self, option: list[Symbol], good: set[str]) -> bool:
        return all(symbol in good if isinstance(symbol, str) else bool(symbol) for symbol in option)

    def read(self, text: str) -> tuple[int, list[bool]]:
        # (characters of the longest beginning that some text of the language has, whether each beginning is whole)
        chart = [{("root", tuple(option), 0) for option in self.productions["root"]}]
        whole = []
        for number in range(len(text) + 1):
            self.close(chart)
            whole.append(any(name == "root" and not rest and not begin for name, rest, begin in chart[-1]))
            following = {
                (name, rest[1:], begin)
                for name, rest, begin in chart[-1]
                if number < len(text) and rest and not isinstance(rest[0], str) and text[number] in rest[0]
            }
            if not following:
                return number, whole
            chart.append(following)
        return len(text), whole

    def close(self, chart: list[set[tuple[str, tuple[Symbol, ...], int]]]) -> None:
        while True:
            found = set()
            for name, rest, begin in chart[-1]:
                if not rest:
                    found |= {(user, more[1:], at) for user, more, at in chart[begin] if more and more[0] == name}
                elif isinstance(rest[0], str):
                    found |= {(rest[0], tuple(option), len(chart) - 1) for option in self.productions[rest[0]]}
            if found <= chart[-1]:
                return
            chart[-1] |= found


ATOMS = st.one_of(
    st.tuples(st.just("text"), st.text(ALPHABET, max_size=3)),
    st.tuples(st.just("class"), st.sampled_from(["a", "b", "ab", "aü"]), st.booleans()),
    st.tuples(st.just("rule"), st.sampled_from(RULES)),
)
PARTS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["choice", "joined", "joined"]), st.lists(inner, min_size=2, max_size=3)),
        st.tuples(st.just("repeated"), inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}", "{0}"])),
    ),
    max_leaves=5,
)
TEXTS = st.lists(st.text(ALPHABET, max_size=7), min_size=1, max_size=12)


def compare(rules: dict[str, Part], texts: list[str]) -> None:
    plain = Plain.of(rules)
    assume(plain.productions["root"])
    grammar = "\n".join(f"{name} ::= {written(part)}" for name, part in rules.items())
    found = matcher(lark_grammar(ebnf.to_lark(grammar)))
    for text in texts:
        num_read, whole = plain.read(text)
        num_allowed = found.validate_tokens(list(text.encode()))
        assert len(text.encode()[:num_allowed].decode(errors="ignore")) == num_read, (grammar, text)
        for length in range(num_read + 1):
            assert takes(found, text[:length]) == whole[length], (grammar, text[:length])


@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(RULES, PARTS)), PARTS, PARTS, TEXTS)
def test_masks_allow_what_the_grammar_does(rules: dict[str, Part], before: Part, after: Part, texts: list[str]) -> None:
    again = ("joined", [before, ("rule", "root"), after])
    compare(rules, texts)
    compare(rules | {"root": ("choice", [rules["root"], again])}, texts)


ARITHMETIC = r"""
root ::= (expr "=" ws term "\n")+
expr ::= term ([-+*/] term)*
term ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \t\n]*
"""


@pytest.mark.parametrize(
    ("grammar", "taken"),
    [
        ('root ::= word "s"\nword ::= [a-z]+', ["cats", "ss"]),
        (ARITHMETIC, ["a=b\n", "1+2 = 3\n\n", "x=(y)\nz=1\n"]),
        ('root ::= "[" root "]" | ("a" | "ab") ("c" | "bd")', ["abd", "[abc]", "[[ac]]"]),
        ('root ::= [^aü]* | root "ü" # a number', ["cü", "cüü", "é"]),
        ('root ::= "a" | "b" endless\nendless ::= "c" endless', ["a"]),
    ],
)
def test_a_longest_match_keeps_nothing_out(grammar: str, taken: list[str]) -> None:
    found = matcher(lark_grammar(ebnf.to_lark(grammar)))
    assert all(takes(found, text) for text in taken)
    assert found.validate_tokens([ord("b")]) == ("word" in grammar or "num" in grammar)


def test_a_grammar_too_large_to_compare_is_read_by_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexemes, "MAX_STEPS", 30)
    text = ebnf.to_lark(ARITHMETIC)
    assert "T_" not in text
    assert takes(matcher(lark_grammar(text)), "1+2 = 3\n\n")


def test_strings_of_json_stay_lexemes() -> None:
    text = ebnf.to_lark(
        r"""root ::= object
value ::= object | string
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
string ::= "\"" ([^"\\] | "\\" ["\\])* "\"" ws
ws ::= [ \n]*"""
    )
    assert "T_STRING" in text
    assert "r_string" not in text


def test_a_rule_that_never_ends_is_refused() -> None:
    with pytest.raises(ValueError, match="without end"):
        ebnf.to_lark('root ::= "(" root ")"')
