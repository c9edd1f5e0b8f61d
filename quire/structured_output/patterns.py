"""ECMA-262 regular expressions of JSON schemas (`pattern`, `patternProperties`), in Rust's syntax."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass

MAX_CHARACTERS = 2**16
MAX_DEPTH = 100
"""Deepest nesting of parentheses."""
MAX_STATES = 4096
MAX_STEPS = 1_000_000
STEP_CHARACTERS = 64
LAST_CHARACTER = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
DIGITS: Ranges = ((0x30, 0x39),)
WORDS: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
BLANKS: Ranges = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
SETS = {"d": DIGITS, "w": WORDS, "s": BLANKS}
CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_COUNT = re.compile(r"\{([0-9]{1,9})(?:(,)([0-9]{1,9})?)?\}")
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|c([A-Za-z]))")
_LOW_HALF = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_PROPERTY = re.compile(r"\\[pP](?:\{[A-Za-z_=0-9]{1,64}\}|[A-Z])")
_GROUP = re.compile(r"\((?:\?(?::|P?<[A-Za-z_][A-Za-z0-9_]*>))?")
_FLAGS = re.compile(r"\(\?[a-zA-Z-]+[:)]")


@dataclass(frozen=True)
class Characters:
    """Node of a parsed expression: one character of a set. ranges: ascending and disjoint; None if `text` names a
    Unicode property."""

    ranges: Ranges | None
    text: str


@dataclass(frozen=True)
class Anchor:
    is_end: bool


@dataclass(frozen=True)
class PatternSequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class PatternChoice:
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repetition:
    part: Node
    low: int
    high: int | None


Node = Characters | Anchor | PatternSequence | PatternChoice | Repetition


class UnknownSyntaxError(ValueError):
    """Expression with flags of Rust's or Python's, which ECMA-262 lacks."""


def parse(pattern: str) -> Node:
    """Parse a regular expression. Raises ValueError, and UnknownSyntaxError for flags."""
    if len(pattern) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(pattern)} characters, more than {MAX_CHARACTERS}")
    return _Parser(pattern).parse()


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def parse(self) -> Node:
        found = self._choice(0)
        if self._at < len(self._pattern):
            raise ValueError(f"the parenthesis at {self._at} closes nothing")
        return found

    def _choice(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise ValueError(f"parentheses are nested more than {MAX_DEPTH} levels deep")
        options = [self._sequence(depth)]
        while self._pattern.startswith("|", self._at):
            self._at += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else PatternChoice(tuple(options))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else PatternSequence(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        sign = self._pattern[self._at : self._at + 1]
        if sign and sign in "*+?":
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
            self._at += 1
        elif found := _COUNT.match(self._pattern, self._at):
            low = int(found[1])
            high = low if not found[2] else None if found[3] is None else int(found[3])
            self._at = found.end()
        else:
            return part
        if high is not None and high < low:
            raise ValueError(f"{{{low},{high}}} counts down")
        if isinstance(part, Anchor):
            raise ValueError("an anchor cannot be repeated")
        if self._pattern.startswith("?", self._at):
            self._at += 1  # the shorter match first: the same language
        return Repetition(part, low, high)

    def _atom(self, depth: int) -> Node:
        character = self._pattern[self._at]
        if character == "(":
            return self._group(depth)
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escape()
        if character in "*+?":
            raise ValueError(f"{character} at {self._at} repeats nothing")
        self._at += 1
        if character == "^":
            return Anchor(is_end=False)
        if character == "$":
            return Anchor(is_end=True)
        if character == ".":
            return _of_ranges(_complement(LINE_ENDS))
        return _of_ranges(((ord(character), ord(character)),))

    def _group(self, depth: int) -> Node:
        found = _GROUP.match(self._pattern, self._at)
        assert found is not None
        if self._pattern.startswith("?", found.end()):
            if _FLAGS.match(self._pattern, self._at):
                raise UnknownSyntaxError
            raise ValueError("look-around is not supported")
        self._at = found.end()
        inner = self._choice(depth + 1)
        if not self._pattern.startswith(")", self._at):
            raise ValueError("a parenthesis is not closed")
        self._at += 1
        return inner

    def _escape(self) -> Node:
        letter = self._pattern[self._at + 1 : self._at + 2]
        if letter in ("A", "Z", "z"):  # Python's and Rust's anchors
            self._at += 2
            return Anchor(is_end=letter != "A")
        if letter in ("b", "B"):
            raise ValueError(rf"the boundary of a word, \{letter}, is not supported")
        if letter and letter in "123456789k":
            raise ValueError("references to groups are not supported")
        return self._member()

    def _member(self) -> Characters:
        pattern, start = self._pattern, self._at
        if pattern[start] != "\\":
            self._at += 1
            return _of_ranges(((ord(pattern[start]), ord(pattern[start])),))
        letter = pattern[start + 1 : start + 2]
        if letter.lower() in SETS:
            self._at += 2
            ranges = SETS[letter.lower()]
            return _of_ranges(ranges if letter.islower() else _complement(ranges))
        if found := _PROPERTY.match(pattern, start):
            self._at = found.end()
            return Characters(None, found[0])
        code = self._code()
        return _of_ranges(((code, code),))

    def _code(self) -> int:
        pattern, start = self._pattern, self._at
        letter = pattern[start + 1 : start + 2]
        if found := _CODE.match(pattern, start):
            self._at = found.end()
            if found[4]:
                return ord(found[4]) % 32
            code = int(found[1] or found[2] or found[3], 16)
            if 0xD800 <= code < 0xDC00 and (low := _LOW_HALF.match(pattern, self._at)):
                self._at = low.end()
                code = 0x10000 + (code - 0xD800) * 1024 + int(low[1], 16) - 0xDC00
            if code > LAST_CHARACTER or 0xD800 <= code < 0xE000:
                raise ValueError(f"there is no character {found[0]}")
            return code
        self._at = start + 2
        if letter in CONTROLS:
            return CONTROLS[letter]
        if letter == "0" and not pattern[start + 2 : start + 3].isdigit():
            return 0
        if not letter or letter.isalnum():
            raise ValueError(f"there is no escape \\{letter}")
        return ord(letter)

    def _class(self) -> Node:
        self._at += 1
        is_negated = self._pattern.startswith("^", self._at)
        self._at += is_negated
        members: list[Characters] = []
        while not self._pattern.startswith("]", self._at):
            if self._at >= len(self._pattern):
                raise ValueError("a class of characters is not closed")
            low = self._class_member()
            if self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at):
                dash = self._at
                self._at += 1
                if self._at >= len(self._pattern):
                    raise ValueError("a class of characters is not closed")
                high = self._class_member()
                if (first := _one(low)) is None or (last := _one(high)) is None:
                    members += [low, _of_ranges(((ord("-"), ord("-")),)), high]
                    continue
                if last < first:
                    raise ValueError(f"the range at {dash} counts down")
                low = _of_ranges(((first, last),))
            members.append(low)
        self._at += 1
        return _union(members, is_negated)

    def _class_member(self) -> Characters:
        if self._pattern.startswith("\\b", self._at):
            self._at += 2
            return _of_ranges(((0x08, 0x08),))
        return self._member()


def _one(found: Characters) -> int | None:
    ranges = found.ranges
    return ranges[0][0] if ranges is not None and len(ranges) == 1 and ranges[0][0] == ranges[0][1] else None


def _union(members: list[Characters], is_negated: bool) -> Characters:
    if all(each.ranges is not None for each in members):
        ranges = _merged([pair for each in members for pair in each.ranges or ()])
        ranges = _complement(ranges) if is_negated else ranges
        if not ranges:
            raise ValueError("a class of characters is empty")
        return _of_ranges(ranges)
    inner = "".join(each.text if each.ranges is None else _class_text(each.ranges) for each in members)
    return Characters(None, f"[{'^' if is_negated else ''}{inner}]")


def _merged(ranges: list[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def _complement(ranges: Ranges) -> Ranges:
    found, start = [], 0
    for low, high in _merged([*ranges, (0xD800, 0xDFFF)]):
        if low > start:
            found.append((start, low - 1))
        start = high + 1
    return (*found, (start, LAST_CHARACTER)) if start <= LAST_CHARACTER else tuple(found)


def _of_ranges(ranges: Ranges) -> Characters:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return Characters(ranges, _character(ranges[0][0]))
    return Characters(ranges, f"[{_class_text(ranges)}]")


def _class_text(ranges: Ranges) -> str:
    return "".join(_character(low) + (f"-{_character(high)}" if high > low else "") for low, high in ranges)


def _character(code: int) -> str:
    character = chr(code)
    if (character.isascii() and character.isalnum()) or character in " _%\"'=,;:!<>@`":
        return character if character not in "<>" else f"\\x{code:02x}"
    return f"\\x{code:02x}" if code < 0x80 else character if character.isprintable() else f"\\u{{{code:x}}}"


def written(node: Node) -> str:
    match node:
        case Characters():
            return node.text
        case Anchor():
            return "$" if node.is_end else "^"
        case PatternSequence():
            return "".join(_grouped(part) if isinstance(part, PatternChoice) else written(part) for part in node.parts)
        case PatternChoice():
            return "|".join(written(option) for option in node.options)
    inner = written(node.part) if isinstance(node.part, Characters) else _grouped(node.part)
    if (node.low, node.high) in (sign := {(0, None): "*", (1, None): "+", (0, 1): "?"}):
        return inner + sign[node.low, node.high]
    return f"{inner}{{{node.low}}}" if node.low == node.high else f"{inner}{{{node.low},{_or_empty(node.high)}}}"


def _or_empty(value: int | None) -> str:
    return "" if value is None else str(value)


def _grouped(node: Node) -> str:
    return f"(?:{written(node)})"


def takes_all(node: Node | None) -> bool:
    """True if the expression is found in every text, as `.*` and the empty one are."""
    match node:
        case PatternSequence():
            return all(map(takes_all, node.parts))
        case PatternChoice():
            return any(map(takes_all, node.options))
        case Repetition():
            return node.low == 0 or takes_all(node.part)
    return False


def num_words(node: Node) -> int:
    """Maximum count for a part with two unbounded repetitions in a row (500 of `(\\S+\\s+){1,500}`), whose masks take
    long."""
    return _counted(node)[1]


def _counted(node: Node) -> tuple[int, int]:
    match node:
        case PatternSequence(parts):
            found = [_counted(part) for part in parts]
            return sum(endless for endless, _ in found), max((words for _, words in found), default=0)
        case PatternChoice(options):
            found = [_counted(option) for option in options]
            return max(endless for endless, _ in found), max(words for _, words in found)
        case Repetition(part, _, high):
            endless, words = _counted(part)
            return (1 if high is None else endless), max(words, high or 0 if endless > 1 else 0)
    return 0, 0


class Budget:
    def __init__(self, num_steps: int = MAX_STEPS) -> None:
        self._num_steps = num_steps

    def spend(self, count: int = 1) -> None:
        """Count steps. Raises ValueError when no steps are left."""
        self._num_steps -= count
        if self._num_steps < 0:
            raise ValueError("the patterns are too large to be compared with the names of properties")


class PatternMatcher:
    """Finds an expression in texts."""

    def __init__(self, node: Node, budget: Budget) -> None:
        self._budget = budget
        self._edges: list[list[tuple[Node | None, int]]] = [[]]
        """State -> (edge, target); None needs no character, an Anchor a place."""
        self._moves: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._sets: dict[frozenset[int], frozenset[int]] = {}
        """One object for each set of states."""
        self._end = self._add(node, 0)

    def is_found(self, text: str) -> bool:
        """True if some part of the text matches. Raises ValueError when the budget is spent."""
        self._budget.spend(1 + len(text))
        states = self._closed({0}, is_start=True, is_end=not text)
        for index, character in enumerate(text):
            if self._end in states:
                return True
            states = self._moved(states, character, is_end=index == len(text) - 1)
        return self._end in states

    def _moved(self, states: frozenset[int], character: str, is_end: bool) -> frozenset[int]:
        key = (states, character + "$" * is_end)
        found = self._moves.get(key)
        if found is None:
            code = ord(character)
            reached = {0}
            for state in states:
                for edge, target in self._edges[state]:
                    self._budget.spend()
                    if isinstance(edge, Characters) and _holds(edge, code):
                        reached.add(target)
            found = self._moves[key] = self._closed(reached, is_start=False, is_end=is_end)
        return found

    def _closed(self, states: set[int], *, is_start: bool, is_end: bool) -> frozenset[int]:
        todo, found = list(states), set(states)
        while todo:
            for edge, target in self._edges[todo.pop()]:
                self._budget.spend()
                is_free = edge is None or (isinstance(edge, Anchor) and (is_end if edge.is_end else is_start))
                if is_free and target not in found:
                    found.add(target)
                    todo.append(target)
        closed = frozenset(found)
        return self._sets.setdefault(closed, closed)

    def _state(self) -> int:
        if len(self._edges) >= MAX_STATES:
            raise ValueError("is too large to be compared with the names of properties")
        self._edges.append([])
        return len(self._edges) - 1

    def _add(self, node: Node, start: int) -> int:
        self._budget.spend()
        match node:
            case PatternSequence():
                for part in node.parts:
                    start = self._add(part, start)
                return start
            case PatternChoice():
                end = self._state()
                for option in node.options:
                    self._edges[self._add(option, start)].append((None, end))
                return end
            case Repetition():
                return self._add_repetition(node, start)
        end = self._state()
        self._edges[start].append((node, end))
        return end

    def _add_repetition(self, node: Repetition, start: int) -> int:
        for _ in range(node.low):
            start = self._add(node.part, start)  # which counts as a step, so that MAX_STEPS ends it
        end = self._state()
        if node.high is None:
            loop = self._state()
            self._edges[start].append((None, loop))
            self._edges[self._add(node.part, loop)].append((None, loop))
            self._edges[loop].append((None, end))
            return end
        for _ in range(node.high - node.low):
            self._edges[start].append((None, end))
            start = self._add(node.part, start)
        self._edges[start].append((None, end))
        return end


def _holds(edge: Characters, code: int) -> bool:
    if edge.ranges is None:
        raise ValueError("properties of Unicode cannot be compared with the names of properties")
    index = bisect_right(edge.ranges, (code, LAST_CHARACTER)) - 1
    return index >= 0 and code <= edge.ranges[index][1]


class Languages:
    """Lists of the texts that expressions match, if few."""

    def __init__(self, limit: int, max_length: int, budget: Budget) -> None:
        """limit: most texts of an expression. max_length: most characters of a text."""
        self._limit = limit
        self._max_length = max_length
        self._budget = budget

    def of(self, node: Node) -> set[str] | None:
        """All texts that match an expression with anchors at both ends; None above the limits. Raises ValueError when
        the budget is spent."""
        found: set[str] = set()
        for option in node.options if isinstance(node, PatternChoice) else (node,):
            parts = option.parts if isinstance(option, PatternSequence) else ()
            if len(parts) < 2 or parts[0] != Anchor(is_end=False) or parts[-1] != Anchor(is_end=True):
                return None
            texts = self._texts(PatternSequence(parts[1:-1]))
            self._budget.spend(len(found))
            if texts is None or len(found := found | texts) > self._limit:
                return None
        return found

    def _texts(self, node: Node) -> set[str] | None:
        self._budget.spend()
        found: set[str] = set()
        match node:
            case Characters(ranges=ranges):
                if ranges is None or sum(high - low + 1 for low, high in ranges) > self._limit:
                    return None
                self._budget.spend(sum(high - low + 1 for low, high in ranges))
                return {chr(code) for low, high in ranges for code in range(low, high + 1)}
            case Anchor():
                return None
            case PatternChoice():
                for option in node.options:
                    self._budget.spend(len(found))
                    texts = self._texts(option)
                    if texts is None or len(found := found | texts) > self._limit:
                        return None
                return found
            case Repetition():
                texts = self._texts(node.part)
                return None if texts is None or node.high is None else self._powers(texts, node.low, node.high)
        product: set[str] | None = {""}
        for part in node.parts:
            texts = self._texts(part)
            product = None if texts is None or product is None else self._joined(product, texts)
            if product is None:
                return None
        return product

    def _powers(self, texts: set[str], low: int, high: int) -> set[str] | None:
        if texts == {""} or high == 0:
            return {""}
        if high > self._max_length + 1:
            return None
        found: set[str] = set()
        product: set[str] | None = {""}
        for count in range(high + 1):
            self._budget.spend(len(found))
            if product is None or (count >= low and len(found := found | product) > self._limit):
                return None
            product = self._joined(product, texts) if count < high else product
        return found

    def _joined(self, first: set[str], second: set[str]) -> set[str] | None:
        length = max(map(len, first), default=0) + max(map(len, second), default=0)
        if length > self._max_length:
            return None
        self._budget.spend(len(first) * len(second) * (1 + length // STEP_CHARACTERS))
        found = {each + other for each in first for other in second}
        return found if len(found) <= self._limit else None
