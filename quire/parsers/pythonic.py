"""Tool calls as Python: `[f(a=1), g(b="x")]` (Llama 3.2, Llama 4, LFM2), or one per line (OLMo 3).

Arguments are read as literals, never evaluated; anything else becomes a string.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.parsers.arguments import dumped, json_string, parameter_names, python_literal
from quire.parsers.output import Output
from quire.parsers.reader import Markers, Steps, TextReader
from quire.parsers.reasoning import Break

_NAME = re.compile(r"[\w.-]*")
_SPECIAL = re.compile(r"""["'\[\](){},]""")
_IN_SINGLE, _IN_DOUBLE = re.compile(r"['\\]"), re.compile(r'["\\]')
_KEYWORD = re.compile(r"\s*([^\W\d]\w*)\s*=(?!=)")
_PADDED = re.compile(r"\s*-?0[0-9]{1,15}\s*")
"""Number with leading zeros, which Python forbids."""
_CLOSING = frozenset(")]}")


@dataclass(frozen=True)
class PythonicFormat:
    """start, end: markers around a list of calls, or empty. is_bare: a list at the beginning of the output needs no
    marker. has_brackets: square brackets enclose the calls."""

    start: str = ""
    end: str = ""
    is_bare: bool = True
    has_brackets: bool = True

    @property
    def breaks(self) -> tuple[Break, ...]:
        marked = (Break(self.start, (("[",),) if self.has_brackets else ()),) if self.start else ()
        return (*marked, Break("[", named="{}(")) if self.is_bare else marked

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.end) if self.start else ()

    def parse(self, reader: TextReader, output: Output) -> Steps[None]:
        if self.is_bare:
            space = yield from reader.space()
            if not self.start or (yield from reader.peek()) == "[":
                yield from self._block(reader, output, space)
            else:
                output.content(space)
        if not self.start:
            return
        starts = Markers(self.start)
        while (yield from output.until(reader, starts)) is not None:
            yield from self._block(reader, output, self.start)

    def _block(self, reader: TextReader, output: Output, start: str) -> Steps[None]:
        raw = start + (yield from reader.space())
        if self.has_brackets:
            if not (yield from reader.take_if("[")):
                output.content(raw)
                return
            raw += "[" + (yield from reader.space())
            if start == self.start and self.end and (yield from reader.take_if("]")):
                yield from reader.space()
                yield from reader.take_if(self.end)
                return
        first = output.num_calls
        while True:
            left = yield from self._call(reader, output)
            if left is not None:
                output.content(left if output.num_calls > first else raw + left)
                return
            yield from reader.space()
            if (yield from reader.take_if(",")):
                yield from reader.space()
            if self.has_brackets and (yield from reader.take_if("]")):
                break
            if self.end and (yield from reader.take_if(self.end)):
                return
            if not (yield from reader.peek()):
                return
        yield from reader.space()
        if self.end:
            yield from reader.take_if(self.end)

    def _call(self, reader: TextReader, output: Output) -> Steps[str | None]:
        space = yield from reader.space()
        name = yield from reader.take_while(_NAME)
        if not name or (yield from reader.peek()) != "(" or not output.knows(name):
            return space + name
        yield from reader.take()
        output.begin_call(name)
        unnamed = iter(parameter_names(output.schemas.get(name)))
        separator = "{"
        while True:
            text, mark = yield from _expression(reader)
            if mark and text.strip():
                keyword = _KEYWORD.match(text)
                key = keyword[1] if keyword else next(unnamed, "")
                value = _json_of(text[keyword.end() :] if keyword else text)
                output.arguments(f"{separator}{json_string(key)}: {value}")
                separator = ", "
            if mark != ",":
                if mark:
                    output.arguments("{}" if separator == "{" else "}")
                return None


def _expression(reader: TextReader) -> Steps[tuple[str, str]]:
    parts: list[str] = []
    depth = 0
    while True:
        mark = yield from reader.scan(_SPECIAL, parts.append)
        if not mark:
            return "".join(parts), ""
        yield from reader.take()
        if depth == 0 and (mark == "," or mark in _CLOSING):
            return "".join(parts), "," if mark == "," else ")"
        parts.append(mark)
        if mark in "\"'":
            yield from _string(reader, mark, parts)
        elif mark != ",":
            depth += -1 if mark in _CLOSING else 1


def _string(reader: TextReader, quote: str, parts: list[str]) -> Steps[None]:
    closing = quote
    if (yield from reader.peek(2)) == 2 * quote:
        parts.append((yield from reader.take(2)))
        if (yield from reader.peek()) != quote:
            return  # an empty string
        parts.append((yield from reader.take()))
        closing = 3 * quote
    special = _IN_DOUBLE if quote == '"' else _IN_SINGLE
    while True:
        mark = yield from reader.scan(special, parts.append)
        if not mark:
            return
        if mark == "\\":
            parts.append((yield from reader.take(2)))
        elif (yield from reader.peek(len(closing))) == closing:
            parts.append((yield from reader.take(len(closing))))
            return
        else:
            parts.append((yield from reader.take()))


def _json_of(text: str) -> str:
    if _PADDED.fullmatch(text):
        return str(int(text))
    try:
        return dumped(python_literal(text))
    except ValueError:
        return json_string(text.strip())
