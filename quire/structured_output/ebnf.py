"""Translation of EBNF grammars (`name ::= ...`, as in llama.cpp and xgrammar) to Lark's syntax."""

from __future__ import annotations

import re
from collections.abc import Callable

from quire.structured_output.lexemes import (
    Alternatives,
    Character,
    Joined,
    Lexemes,
    Node,
    Reference,
    Repeated,
    complement,
    nodes_of,
    parts_of,
)
from quire.structured_output.patterns import LAST_CHARACTER

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

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip_blanks()
        while self._at < len(self._text):
            name = _NAME.match(self._text, self._at)
            head = _HEAD.match(self._text, name.end()) if name else None
            if name is None or head is None:
                raise self._error("a rule `name ::= ...` is expected")
            if name[0] in rules:
                raise self._error(f"the rule {name[0]:.100} is there twice")
            self._at = head.end()
            self._skip_blanks()
            rules[name[0]] = self._alternatives(0)
            if self._at < len(self._text) and not self._is_rule():
                raise self._error(f"{self._text[self._at]!r} is not expected here")
        return rules

    def _is_rule(self) -> bool:
        name = _NAME.match(self._text, self._at)
        return name is not None and _HEAD.match(self._text, name.end()) is not None

    def _alternatives(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self._error(f"parentheses are nested more than {MAX_DEPTH} levels deep")
        options: list[Node] = []
        while True:
            parts = []
            while self._at < len(self._text) and self._text[self._at] not in "|)" and not self._is_rule():
                parts.append(self._repeated(self._element(depth)))
                self._skip_blanks()
            options.append(parts[0] if len(parts) == 1 else Joined(parts))
            if not self._text.startswith("|", self._at):
                return options[0] if len(options) == 1 else Alternatives(options)
            self._at += 1
            self._skip_blanks()

    def _element(self, depth: int) -> Node:
        character = self._text[self._at]
        if character == '"':
            return self._literal()
        if character == "[":
            return self._class()
        if character == ".":
            self._at += 1
            return Character("/(?s:.)/", ((0, LAST_CHARACTER),))
        if character == "(":
            self._at += 1
            self._skip_blanks()
            found = self._alternatives(depth + 1)
            if not self._text.startswith(")", self._at):
                raise self._error("a parenthesis is not closed")
            self._at += 1
            return found
        if name := _NAME.match(self._text, self._at):
            self._at = name.end()
            return Reference(name[0])
        raise self._error(f"{character!r} is not expected here")

    def _repeated(self, part: Node) -> Node:
        found = _REPEAT.match(self._text, self._at)
        if found is None:
            return part
        self._at = found.end()
        sign, low, comma, high = found.groups()
        if sign is not None:
            return Repeated(part, sign, sign != "+", 1 if sign == "?" else None)
        least = int(low)
        most = least if not comma else None if high is None else int(high)
        if most is not None and most < least:
            raise self._error(f"no number is from {least} to {most}")
        if most == 0:
            return Joined([])
        sign = f"{{{least}}}" if not comma else f"{{{least},{'' if most is None else most}}}"
        return Repeated(part, sign, least == 0, most)

    def _literal(self) -> Node:
        self._at += 1
        pieces = []
        while not self._text.startswith('"', self._at):
            pieces.append(self._character())
        self._at += 1
        parts: list[Node] = [Character(quoted(each), ((ord(each), ord(each)),)) for each in pieces]
        return parts[0] if len(parts) == 1 else Joined(parts, quoted("".join(pieces)))

    def _class(self) -> Node:
        self._at += 1
        pieces, ranges = ["["], []
        is_negated = self._text.startswith("^", self._at)
        if is_negated:
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
            ranges.append((ord(low), ord(high)))
        self._at += 1
        if len(pieces) == 1:
            raise self._error("a class of characters is empty")
        text = "/(?s:.)/" if pieces == ["[", "^"] else f"/{''.join(pieces)}]/"
        return Character(text, complement(tuple(ranges)) if is_negated else tuple(ranges))

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


def _written(rules: dict[str, Node]) -> str:
    if ROOT not in rules:
        raise ValueError(f"there is no rule {ROOT}")
    for name, body in rules.items():
        for node in nodes_of(body):
            if isinstance(node, Reference) and node.name not in rules:
                raise ValueError(f"the rule {name:.100} refers to {node.name:.100}, which is no rule")
    return _Writer(rules).text()


class _Writer:
    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._lexemes = Lexemes(rules, ROOT)
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._waiting: list[tuple[str, bool]] = []
        self._seen = set[tuple[str, bool]]()
        self._lines: list[str] = []
        self._num_parts = 0

    def text(self) -> str:
        root = Reference(ROOT)
        self._lines.append(f"start: {self._rule(root)}")
        while self._waiting:
            name, is_terminal = self._waiting.pop()
            body = self._rules[name]
            self._lines.append(
                f"{self._name(name, is_terminal)}: {self._terminal(body) if is_terminal else self._rule(body)}"
            )
        return "%llguidance {}\n" + "\n".join(self._lines) + "\n"

    def _name(self, name: str, is_terminal: bool) -> str:
        if (name, is_terminal) not in self._seen:
            self._seen.add((name, is_terminal))
            self._waiting.append((name, is_terminal))
        clean = re.sub(r"[^a-z0-9]", "_", name.lower()) + f"_{self._numbers[name]}"
        return f"T_{clean.upper()}" if is_terminal else f"r_{clean}"

    def _rule(self, node: Node) -> str:
        if not self._lexemes.is_lexeme(node):
            return self._name(node.name, False) if isinstance(node, Reference) else self._joined(node, self._rule)
        text = self._terminal(node)
        if isinstance(node, (Character, Reference)) or (isinstance(node, Joined) and node.literal is not None):
            return text
        self._num_parts += 1
        self._lines.append(f"T_{self._num_parts}: {text}")
        return f"T_{self._num_parts}"

    def _terminal(self, node: Node) -> str:
        if isinstance(node, Character):
            return node.text
        if isinstance(node, Reference):
            return self._name(node.name, True)
        if isinstance(node, Joined) and node.literal is not None:
            return node.literal
        return self._joined(node, self._terminal)

    def _joined(self, node: Node, write: Callable[[Node], str]) -> str:
        texts = [write(part) for part in parts_of(node)]
        if isinstance(node, Repeated):
            return (f"({texts[0]})" if isinstance(node.part, Repeated) else texts[0]) + node.sign
        return "(" + (" | " if isinstance(node, Alternatives) else " ").join(texts) + ")" if texts else '""'
