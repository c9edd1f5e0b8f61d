"""Translation of EBNF grammars (`name ::= ...`, as in llama.cpp and xgrammar) to Lark's syntax, in linear time. A rule
that refers only to such rules, or to none, becomes a terminal, which makes masks fast."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

MAX_DEPTH = 100
"""Deepest nesting of parentheses."""
ROOT = "root"
_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*)*")
_NAME = re.compile(r"[\w-]+")
_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_HEAD = re.compile(r"[ \t]*::=")
_REPEAT = re.compile(r"[ \t]*(?:([*+?])|\{\s*([0-9]{1,9})\s*(?:(,)\s*([0-9]{1,9})?\s*)?\})")
_ESCAPE = re.compile(r"\\(?:(?P<simple>[\"\\\[\]nrt\-^/'])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}
_TO_QUOTE = re.compile(r'[\x00-\x1f\x7f"\\]')
_CLASS_SPECIAL = frozenset("[]^-\\/&~")


@dataclass
class _Rule:
    name: str
    position: int
    parts: list[str] = field(default_factory=list)
    """Pieces of the right side; a reference is a NUL and the name."""
    references: set[str] = field(default_factory=set)


def is_ebnf(text: str) -> bool:
    """True if a line begins with `name ::=`, which Lark's syntax never has."""
    return _RULE.search(text) is not None


def to_lark(text: str) -> str:
    """Convert a client's grammar to Lark's syntax. Raises ValueError with the line for an invalid grammar."""
    return _written(_Reader(text).rules())


def quoted(text: str) -> str:
    return '"' + _TO_QUOTE.sub(_escape, text) + '"'


def _escape(found: re.Match[str]) -> str:
    return "\\" + found[0] if found[0] in '"\\' else f"\\x{ord(found[0]):02x}"


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, _Rule]:
        rules: dict[str, _Rule] = {}
        self._skip_blanks()
        while self._at < len(self._text):
            rule = self._rule()
            if rule.name in rules:
                raise self._error(f"the rule {rule.name:.100} is there twice")
            rules[rule.name] = rule
        return rules

    def _rule(self) -> _Rule:
        name = _NAME.match(self._text, self._at)
        head = _HEAD.match(self._text, name.end()) if name else None
        if name is None or head is None:
            raise self._error("a rule `name ::= ...` is expected")
        rule = _Rule(name[0], self._at)
        self._at = head.end()
        self._skip_blanks()
        self._alternatives(rule, 0)
        if self._at < len(self._text) and not self._is_rule():
            raise self._error(f"{self._text[self._at]!r} is not expected here")
        return rule

    def _is_rule(self) -> bool:
        name = _NAME.match(self._text, self._at)
        return name is not None and _HEAD.match(self._text, name.end()) is not None

    def _alternatives(self, rule: _Rule, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self._error(f"parentheses are nested more than {MAX_DEPTH} levels deep")
        while True:
            start = len(rule.parts)
            while self._at < len(self._text) and self._text[self._at] not in "|)" and not self._is_rule():
                self._element(rule, depth)
                self._skip_blanks()
            if len(rule.parts) == start:
                rule.parts.append('""')
            if not self._text.startswith("|", self._at):
                return
            rule.parts.append("|")
            self._at += 1
            self._skip_blanks()

    def _element(self, rule: _Rule, depth: int) -> None:
        character = self._text[self._at]
        if character == '"':
            rule.parts.append(self._literal())
        elif character == "[":
            rule.parts.append(self._class())
        elif character == ".":
            rule.parts.append("/(?s:.)/")
            self._at += 1
        elif character == "(":
            self._at += 1
            self._skip_blanks()
            rule.parts.append("(")
            self._alternatives(rule, depth + 1)
            if not self._text.startswith(")", self._at):
                raise self._error("a parenthesis is not closed")
            self._at += 1
            rule.parts.append(")")
        elif name := _NAME.match(self._text, self._at):
            rule.parts.append("\0" + name[0])
            rule.references.add(name[0])
            self._at = name.end()
        else:
            raise self._error(f"{character!r} is not expected here")
        self._repetition(rule)

    def _repetition(self, rule: _Rule) -> None:
        found = _REPEAT.match(self._text, self._at)
        if found is None:
            return
        sign, low, comma, high = found.groups()
        if sign is None:
            sign = f"{{{int(low)},{'' if high is None else int(high)}}}" if comma else f"{{{int(low)}}}"
        rule.parts[-1] += sign
        self._at = found.end()

    def _literal(self) -> str:
        self._at += 1
        pieces = []
        while not self._text.startswith('"', self._at):
            pieces.append(self._character())
        self._at += 1
        return quoted("".join(pieces))

    def _class(self) -> str:
        self._at += 1
        pieces = ["["]
        if self._text.startswith("^", self._at):
            pieces.append("^")
            self._at += 1
        while not self._text.startswith("]", self._at):
            low = self._character()
            high = low
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._character()
                if high < low:
                    raise self._error(f"the range {low!r} to {high!r} is empty")
            pieces.append(_in_class(low) + ("" if high == low else f"-{_in_class(high)}"))
        self._at += 1
        if len(pieces) == 1:
            raise self._error("a class of characters is empty")
        return "/(?s:.)/" if pieces == ["[", "^"] else f"/{''.join(pieces)}]/"

    def _character(self) -> str:
        if self._at >= len(self._text):
            raise self._error("the grammar ends in the midst of a text")
        if self._text[self._at] != "\\":
            self._at += 1
            return self._text[self._at - 1]
        found = _ESCAPE.match(self._text, self._at)
        if found is None:
            raise self._error(f"there is no escape {self._text[self._at : self._at + 2]}")
        self._at = found.end()
        if found["simple"]:
            return _NAMED.get(found["simple"], found["simple"])
        code = int(found[2] or found[3] or found[4], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._error(f"there is no character {found[0]}")
        return chr(code)

    def _skip_blanks(self) -> None:
        found = _BLANK.match(self._text, self._at)
        if found is not None:
            self._at = found.end()

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"line {self._text.count(chr(10), 0, self._at) + 1}: {reason}")


def _in_class(character: str) -> str:
    code = ord(character)
    if character in _CLASS_SPECIAL:
        return "\\" + character
    return f"\\x{code:02x}" if code < 0x20 or code == 0x7F else character


def _written(rules: dict[str, _Rule]) -> str:
    if ROOT not in rules:
        raise ValueError(f"there is no rule {ROOT}")
    for rule in rules.values():
        missing = next((name for name in rule.references if name not in rules), None)
        if missing is not None:
            raise ValueError(f"the rule {rule.name:.100} refers to {missing:.100}, which is no rule")
    terminals = _terminals(rules)
    names = {}
    for number, name in enumerate(rules):
        clean = re.sub(r"[^a-z0-9]", "_", name.lower()) + f"_{number}"
        names[name] = "start" if name == ROOT else f"T_{clean.upper()}" if name in terminals else f"r_{clean}"
    lines = [
        f"{names[rule.name]}: " + " ".join(_named(part, names) if "\0" in part else part for part in rule.parts)
        for rule in rules.values()
    ]
    return "%llguidance {}\n" + "\n".join(lines) + "\n"


def _named(part: str, names: dict[str, str]) -> str:
    found = _NAME.match(part, 1)
    assert found is not None
    return names[found[0]] + part[found.end() :]


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Names of rules from which references lead to no rule that refers to itself."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    for rule in rules.values():
        for name in rule.references:
            users[name].append(rule.name)
    num_open = {name: len(rule.references) for name, rule in rules.items()}
    ready = deque(name for name, count in num_open.items() if not count and name != ROOT)
    found = set[str]()
    while ready:
        name = ready.popleft()
        found.add(name)
        for user in users[name]:
            num_open[user] -= 1
            if not num_open[user] and user != ROOT:
                ready.append(user)
    return found
