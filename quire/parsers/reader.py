"""Reader of text that arrives in pieces, for parsers in straight-line code.

A parser is a generator that pauses until enough text is pushed, however it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Generator that pauses at each yield until the reader has more text or its end; returns T."""
Sink = Callable[[str], None]

MAX_PEEK = 256
"""Maximum characters that `sees_in_turn` examines."""
_SPACE = re.compile(r"\s*")


class Markers:
    """Texts that `until` searches for. The longest match wins."""

    __slots__ = ("_firsts", "_longer", "_longest", "search", "texts")

    def __init__(self, *texts: str) -> None:
        assert all(texts), "a marker needs a text"
        self.texts = tuple(sorted(texts, key=len, reverse=True))
        self.search = re.compile("|".join(map(re.escape, self.texts))).search
        self._firsts = frozenset(text[0] for text in texts)
        self._longest = len(self.texts[0])
        self._longer = [b for b in texts if any(a != b and b.startswith(a) for a in texts)]

    def may_grow(self, text: str, start: int) -> bool:
        """True if text[start:] may continue to a longer marker."""
        rest = len(text) - start
        return any(len(each) > rest and text.startswith(each[:rest], start) for each in self._longer)

    def safe_end(self, text: str, start: int) -> int:
        """Index where the end of text[start:] may begin a marker, else len(text)."""
        for index in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[index] in self._firsts and any(marker.startswith(text[index:]) for marker in self.texts):
                return index
        return len(text)


class TextReader:
    __slots__ = ("_position", "_text", "is_ended")

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self.is_ended = False

    def push(self, text: str) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        self.is_ended = True

    def until(self, markers: Markers, sink: Sink, *, drops_part: bool = False) -> Steps[str | None]:
        """Pass the text up to the first marker to `sink`; read and return the marker; None at the end. drops_part:
        drop part of a marker at the end."""
        while True:
            found = markers.search(self._text, self._position)
            if found is not None:
                self._give(found.start(), sink)
                if not self.is_ended and markers.may_grow(self._text, found.start()):
                    yield
                    continue
                self._position = found.end()
                return found[0]
            is_whole = self.is_ended and not drops_part
            self._give(len(self._text) if is_whole else markers.safe_end(self._text, self._position), sink)
            if self.is_ended:
                self._position = len(self._text)
                return None
            yield

    def rest(self, sink: Sink) -> Steps[None]:
        while True:
            self._give(len(self._text), sink)
            if self.is_ended:
                return
            yield

    def peek(self, count: int = 1) -> Steps[str]:
        """Next `count` characters, unread; fewer at the end."""
        while len(self._text) - self._position < count and not self.is_ended:
            yield
        return self._text[self._position : self._position + count]

    def take(self, count: int = 1) -> Steps[str]:
        """Read the next `count` characters; fewer at the end."""
        found = yield from self.peek(count)
        self._position += len(found)
        return found

    def take_if(self, literal: str) -> Steps[bool]:
        """Read `literal` if it comes next, at the text's end also its beginning; returns True if so."""
        while True:
            there = self._text[self._position : self._position + len(literal)]
            if there == literal or (self.is_ended and there and literal.startswith(there)):
                self._position += len(there)
                return True
            if self.is_ended or not literal.startswith(there):
                return False
            yield

    def sees(self, literal: str) -> Steps[bool]:
        """True if `literal` comes next; it stays unread."""
        while True:
            there = self._text[self._position : self._position + len(literal)]
            if there == literal or self.is_ended or not literal.startswith(there):
                return there == literal
            yield

    def sees_in_turn(self, *parts: Sequence[str]) -> Steps[bool]:
        """True if one text of each part comes next, in order, with optional white space between; all stay unread."""
        count = 0
        while True:
            count += 1
            text = yield from self.peek(count)
            found = _in_turn(text, parts)
            if found is not None or len(text) < count or count >= MAX_PEEK:
                return found is True

    def space(self) -> Steps[str]:
        return (yield from self.take_while(_SPACE))

    def take_while(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read and return the match of `pattern`, a repeated character class."""
        parts = []
        while True:
            found = pattern.match(self._text, self._position)
            assert found is not None, "the pattern matches the empty text"
            parts.append(found[0])
            self._position = found.end()
            if self._position < len(self._text) or self.is_ended:
                return "".join(parts)
            yield

    def scan(self, special: re.Pattern[str], sink: Sink) -> Steps[str]:
        """Pass the text up to a match of `special` to `sink`; return that character unread, "" at the end."""
        while True:
            found = special.search(self._text, self._position)
            if found is not None:
                self._give(found.start(), sink)
                return found[0]
            self._give(len(self._text), sink)
            if self.is_ended:
                return ""
            yield

    def unread(self, text: str) -> None:
        assert self._text.endswith(text, 0, self._position)
        self._position -= len(text)

    def _give(self, end: int, sink: Sink) -> None:
        if end > self._position:
            sink(self._text[self._position : end])
            self._position = end


def _in_turn(text: str, parts: Sequence[Sequence[str]]) -> bool | None:
    """True if the text begins with these parts; None if more text must decide."""
    for part in parts:
        text = text.lstrip()
        found = next((each for each in part if text.startswith(each)), None)
        if found is None:
            return None if any(each.startswith(text) for each in part) else False
        text = text[len(found) :]
    return True


def discard(text: str) -> None:
    """Sink that drops text between a format's markers."""
