"""Largest parts of a grammar that llguidance's lexer, which takes the longest match, reads as the grammar does."""
# Single characters always are; other parts are where no character continues one that may also follow it.

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.structured_output.patterns import LAST_CHARACTER, Ranges

MAX_STEPS = 200_000
# Limit of a grammar's comparisons; then its lexemes are single characters.
MAX_STATES = 2000
LONG = range(0x40000, LAST_CHARACTER, 0x40000)
MAX_REFERENCES = 50
EVERYTHING = -1


@dataclass(eq=False)
class Node:
    is_regular: bool = field(default=True, init=False)


@dataclass(eq=False)
class Character(Node):
    text: str
    ranges: Ranges


@dataclass(eq=False)
class Reference(Node):
    name: str


@dataclass(eq=False)
class Joined(Node):
    parts: list[Node]
    literal: str | None = None


@dataclass(eq=False)
class Alternatives(Node):
    options: list[Node]


@dataclass(eq=False)
class Repeated(Node):
    part: Node
    sign: str
    may_be_none: bool
    high: int | None


@dataclass
class _Automaton:
    # Glushkov's automaton of more than the lexeme: counts are any number. Sets of states and characters are bits.

    characters: list[int] = field(default_factory=list)
    follow: list[int] = field(default_factory=list)
    is_empty: bool = True
    first: int = 0
    last: int = 0

    def begins(self) -> int:
        return _union(self.characters, self.first)


class _TooLargeError(Exception):
    pass


class _OutOfStepsError(Exception):
    pass


def parts_of(node: Node) -> list[Node]:
    if isinstance(node, Joined):
        return node.parts
    if isinstance(node, Alternatives):
        return node.options
    return [node.part] if isinstance(node, Repeated) else []


def regular_rules(rules: dict[str, Node]) -> set[str]:
    """Names of rules from which references lead to no rule that refers to itself."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    num_open = {}
    for name, body in rules.items():
        references = {node.name for node in nodes_of(body) if isinstance(node, Reference)}
        num_open[name] = len(references)
        for reference in references:
            users[reference].append(name)
    ready = deque(name for name, count in num_open.items() if not count)
    found = set[str]()
    while ready:
        name = ready.popleft()
        found.add(name)
        for user in users[name]:
            num_open[user] -= 1
            if not num_open[user]:
                ready.append(user)
    return found


def drop_endless(rules: dict[str, Node], root: str) -> None:
    """Remove alternatives that no text completes. Raises ValueError where that is all."""
    users: dict[Node, list[Node]] = {}
    num_open: dict[Node, int] = {}
    for body in rules.values():
        for node in nodes_of(body):
            needed = [rules[node.name]] if isinstance(node, Reference) else parts_of(node)
            for part in needed:
                users.setdefault(part, []).append(node)
            num_open[node] = len(needed)
            if isinstance(node, Alternatives):
                num_open[node] = 1
            elif isinstance(node, Repeated) and node.may_be_none:
                num_open[node] = 0
            elif isinstance(node, Character) and not node.ranges:
                num_open[node] = 1
    ready = deque(node for node, count in num_open.items() if not count)
    good = set(ready)
    while ready:
        for user in users.get(ready.popleft(), ()):
            num_open[user] -= 1
            if not num_open[user]:
                good.add(user)
                ready.append(user)
    if rules[root] not in good:
        raise ValueError(f"the rule {root} needs a text without end")
    for node in good:
        if isinstance(node, Alternatives):
            node.options = [option for option in node.options if option in good]
        elif isinstance(node, Repeated) and node.part not in good:
            node.part = Joined([])


def nodes_of(node: Node) -> Iterator[Node]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(parts_of(node))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class Lexemes:
    def __init__(self, rules: dict[str, Node], root: str) -> None:
        """rules: bodies, which are changed: regular neighbours become one part, endless ones go. Raises ValueError."""
        self._rules = rules
        self._root = root
        drop_endless(rules, root)
        self._regular = regular_rules(rules)
        for name in rules:
            self._join_neighbours(rules[name])
        self._split = set[Node]()
        self._are_single = False
        self._num_steps = MAX_STEPS
        self._automata: dict[object, _Automaton | None] = {}
        self._compared: dict[tuple[object, object], tuple[int, int, bool]] = {}
        self._edges = self._character_edges()
        try:
            while found := _Round(self, rules, root).unsafe():
                self._split |= found
        except _OutOfStepsError:
            self._are_single = True

    def is_lexeme(self, node: Node) -> bool:
        if isinstance(node, Character):
            return True
        if self._are_single or (isinstance(node, Joined) and not node.parts):
            return False
        whole = self.whole(node)
        return whole.is_regular and whole not in self._split

    def whole(self, node: Node) -> Node:
        return self._rules[node.name] if isinstance(node, Reference) else node

    def spend(self, num_steps: int = 1) -> None:
        self._num_steps -= num_steps
        if self._num_steps < 0:
            raise _OutOfStepsError

    def automaton(self, node: Node) -> _Automaton | None:
        # None: too large.
        key = self.key(node)
        if key not in self._automata:
            found = _Automaton()
            try:
                found.is_empty, found.first, found.last = self._build(found, node, 0)
            except _TooLargeError:
                self._automata[key] = None
            else:
                self._automata[key] = found
        return self._automata[key]

    def key(self, node: Node) -> object:
        # Equal for equal lexemes.
        if isinstance(node, Character):
            return node.text
        return self.whole(node) if not isinstance(node, Joined) or node.literal is None else (node.literal,)

    def compare(self, one: Node, other: Node) -> tuple[int, int, bool]:
        # Characters that continue `other` where `one` is whole, the reverse, and True if both can be whole at once.
        keys = self.key(one), self.key(other)
        if keys not in self._compared:
            first, second, both = self._compare(self.automaton(one), self.automaton(other))
            self._compared[keys] = first, second, both
            self._compared[keys[1], keys[0]] = second, first, both
        return self._compared[keys]

    def _compare(self, one: _Automaton | None, other: _Automaton | None) -> tuple[int, int, bool]:
        if one is None or other is None:
            return EVERYTHING, EVERYTHING, True
        seen, waiting = set[tuple[int, int]](), [(one.first, other.first)]
        after_one = after_other = 0
        both = False
        while waiting:
            lefts, rights = waiting.pop()
            for left in _bits(lefts):
                for right in _bits(rights):
                    self.spend()
                    if (left, right) in seen or not one.characters[left] & other.characters[right]:
                        continue
                    seen.add((left, right))
                    waiting.append((one.follow[left], other.follow[right]))
                    is_one, is_other = one.last >> left & 1, other.last >> right & 1
                    both = both or bool(is_one and is_other)
                    if is_one:
                        after_one |= _union(other.characters, other.follow[right])
                    if is_other:
                        after_other |= _union(one.characters, one.follow[left])
        return after_one, after_other, both

    def _build(self, found: _Automaton, node: Node, depth: int) -> tuple[bool, int, int]:
        # (True if it matches nothing, its first states, its last ones).
        self.spend()
        if isinstance(node, Character):
            if len(found.characters) == MAX_STATES:
                raise _TooLargeError
            found.characters.append(self._characters(node))
            found.follow.append(0)
            state = 1 << (len(found.follow) - 1)
            return False, state, state
        if isinstance(node, Reference):
            if depth == MAX_REFERENCES:
                raise _TooLargeError
            return self._build(found, self._rules[node.name], depth + 1)
        if isinstance(node, Alternatives):
            options = [self._build(found, option, depth) for option in node.options]
            first = last = 0
            for _, begin, end in options:
                first, last = first | begin, last | end
            return any(is_empty for is_empty, _, _ in options), first, last
        if isinstance(node, Repeated):
            is_empty, first, last = self._build(found, node.part, depth)
            if node.high != 1:
                self._link(found, last, first)
            return is_empty or node.may_be_none, first, last
        is_empty, first, last = True, 0, 0
        for part in parts_of(node):
            is_part_empty, begin, end = self._build(found, part, depth)
            self._link(found, last, begin)
            first = first | begin if is_empty else first
            last = last | end if is_part_empty else end
            is_empty = is_empty and is_part_empty
        return is_empty, first, last

    def _link(self, found: _Automaton, last: int, first: int) -> None:
        for state in _bits(last):
            self.spend()
            found.follow[state] |= first

    def _join_neighbours(self, node: Node) -> None:
        for part in parts_of(node):
            self._join_neighbours(part)
        if isinstance(node, Reference):
            node.is_regular = node.name in self._regular
        else:
            node.is_regular = all(part.is_regular for part in parts_of(node))
        if isinstance(node, Joined) and not node.is_regular:
            joined: list[Node] = []
            for part in node.parts:
                if not joined or not part.is_regular or not joined[-1].is_regular:
                    joined.append(part)
                elif isinstance(joined[-1], Joined) and joined[-1].literal is None:
                    joined[-1].parts.append(part)
                else:
                    joined[-1] = Joined([joined[-1], part])
            node.parts = joined

    def _character_edges(self) -> list[int]:
        # Where sets of characters begin and end. The lexer sees bytes: characters of one first byte count as one.
        nodes = [node for body in self._rules.values() for node in nodes_of(body) if isinstance(node, Character)]
        edges = {edge for node in nodes for low, high in node.ranges for edge in (low, high + 1) if 0 < edge < 0x80}
        return sorted({*edges, *range(0x80, 0x800, 0x40), 0x800, *range(0x1000, 0x10000, 0x1000), 0x10000, *LONG})

    def _characters(self, node: Character) -> int:
        mask = 0
        for low, high in node.ranges:
            self.spend()
            first, last = bisect_right(self._edges, low), bisect_right(self._edges, high)
            mask |= (1 << last + 1) - (1 << first)
        return mask


class _Round:
    # Places of lexemes in a grammar: which follow which, and which may be read at once. Sets of places are bits.

    def __init__(self, lexemes: Lexemes, rules: dict[str, Node], root: str) -> None:
        self._lexemes = lexemes
        self._rules = rules
        self._root = root
        self._places: list[Node] = []
        self._numbers: dict[Node, int] = {}
        self._follow: list[int] = []
        self._used: dict[str, Node] = {}
        self._first: dict[str, tuple[bool, int]] = {}
        self._after: dict[str, int] = {}
        self._split = set[Node]()

    def unsafe(self) -> set[Node]:
        # Parts that cannot be lexemes.
        if self._lexemes.is_lexeme(Reference(self._root)):
            return set()
        self._find_places()
        self._find_first()
        self._find_follow()
        begins = [self._begins(place) for place in self._places]
        unions: dict[int, int] = {}
        for follow in self._follow:
            if follow not in unions:
                self._lexemes.spend(follow.bit_count())
                unions[follow] = _union(begins, follow)
        self._compare_together([unions[follow] for follow in self._follow])
        return self._split

    def _find_places(self) -> None:
        waiting = [self._root]
        while waiting:
            name = waiting.pop()
            if name in self._used:
                continue
            body = self._used[name] = self._rules[name]
            nodes = [body]
            while nodes:
                node = nodes.pop()
                self._lexemes.spend()
                if self._lexemes.is_lexeme(node):
                    self._numbers[node] = len(self._places)
                    self._places.append(node)
                elif isinstance(node, Reference):
                    waiting.append(node.name)
                else:
                    nodes.extend(parts_of(node))
        self._follow = [0] * len(self._places)

    def _find_first(self) -> None:
        self._first = dict.fromkeys(self._used, (False, 0))
        names = list(reversed(self._used))
        is_done = False
        while not is_done:
            is_done = True
            for name in names:
                found = self._first_of(self._used[name])
                is_done = is_done and found == self._first[name]
                self._first[name] = found

    def _first_of(self, node: Node) -> tuple[bool, int]:
        # (True if it matches nothing, its first places).
        self._lexemes.spend()
        if node in self._numbers:
            found = self._lexemes.automaton(node)
            return found is None or found.is_empty, 1 << self._numbers[node]
        if isinstance(node, Reference):
            return self._first[node.name]
        if isinstance(node, Repeated):
            is_empty, first = self._first_of(node.part)
            return is_empty or node.may_be_none, first
        is_choice = isinstance(node, Alternatives)
        all_empty, first = not is_choice, 0
        for part in parts_of(node):
            is_empty, begin = self._first_of(part)
            if is_choice:
                all_empty, first = all_empty or is_empty, first | begin
            else:
                first = first | begin if all_empty else first
                all_empty = all_empty and is_empty
        return all_empty, first

    def _find_follow(self) -> None:
        self._after = dict.fromkeys(self._used, 0)
        waiting = dict.fromkeys(self._used)
        while waiting:
            name = next(iter(waiting))
            del waiting[name]
            for changed in self._spread(self._used[name], self._after[name]):
                waiting[changed] = None

    def _spread(self, node: Node, follow: int) -> Iterator[str]:
        # Notes what follows the parts of `node`, and yields rules behind which more follows than before.
        self._lexemes.spend()
        if node in self._numbers:
            self._follow[self._numbers[node]] |= follow
        elif isinstance(node, Reference):
            if follow & ~self._after[node.name]:
                self._after[node.name] |= follow
                yield node.name
        elif isinstance(node, Alternatives):
            for option in node.options:
                yield from self._spread(option, follow)
        elif isinstance(node, Repeated):
            again = 0 if node.high == 1 else self._first_of(node.part)[1]
            yield from self._spread(node.part, follow | again)
        else:
            for part in reversed(parts_of(node)):
                yield from self._spread(part, follow)
                is_empty, first = self._first_of(part)
                follow = follow | first if is_empty else first

    def _begins(self, place: Node) -> int:
        found = self._lexemes.automaton(place)
        return EVERYTHING if found is None else found.begins()

    def _compare_together(self, after: list[int]) -> None:
        # after: characters after each place. Two places are read at once at the start, and behind two that are read
        # at once and match the same text.
        first = self._first[self._root][1]
        waiting = [(first, first)]
        done = set[tuple[int, int]](waiting)
        together = [0] * len(self._places)
        while waiting:
            lefts, rights = waiting.pop()
            for left in _bits(lefts):
                new = rights & ~together[left]
                together[left] |= new
                for right in _bits(new):
                    self._lexemes.spend()
                    after_left, after_right, both = self._lexemes.compare(self._places[left], self._places[right])
                    if after_left & after[left]:
                        self._split.add(self._lexemes.whole(self._places[right]))
                    if after_right & after[right]:
                        self._split.add(self._lexemes.whole(self._places[left]))
                    pair = self._follow[left], self._follow[right]
                    if both and pair not in done:
                        done.add(pair)
                        waiting.append(pair)


def _union(masks: list[int], chosen: int) -> int:
    found = 0
    for index in _bits(chosen):
        found |= masks[index]
    return found


def complement(ranges: Ranges) -> Ranges:
    # Characters that are in none of the ranges.
    found, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return (*found, (start, LAST_CHARACTER)) if start <= LAST_CHARACTER else tuple(found)
