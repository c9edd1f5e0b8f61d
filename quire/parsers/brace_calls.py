"""Tool calls of Gemma 4 and FunctionGemma: `call:NAME{key:value,...}` between markers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from quire.parsers.arguments import coerced, escaped, is_text, json_string, parameter_schema, types_of
from quire.parsers.output import Output
from quire.parsers.reader import Markers, Steps, TextReader
from quire.parsers.reasoning import Break

MAX_DEPTH = 32
"""Maximum depth of brackets; deeper ones are text."""
_BETWEEN = re.compile(r"[\s,]*")


@dataclass(frozen=True)
class BraceFormat:
    """Format of a model's calls. start, end: markers around a call. quote: mark around a string."""

    start: str
    end: str
    quote: str
    head: str = "call:"

    @property
    def breaks(self) -> tuple[Break, ...]:
        return (Break(self.start, ((self.head,),)),)

    @property
    def markers(self) -> tuple[str, ...]:
        return self.start, self.end, self.quote

    def parse(self, reader: TextReader, output: Output) -> Steps[None]:
        starts = Markers(self.start)
        heads = Markers("{", self.end, self.start, *output.ends)
        while (yield from output.until(reader, starts)) is not None:
            parts: list[str] = []
            mark = yield from reader.until(heads, parts.append)
            head, colon, name = "".join(parts).partition(self.head)
            if mark != "{" or head.strip() or not colon or not output.may_call(name.strip()):
                output.content(self.start + "".join(parts))
                reader.unread(mark or "")
                continue
            name = name.strip()
            output.begin_call(name)
            yield from self._object(reader, output, output.schemas.get(name), 1)
            yield from reader.space()
            yield from reader.take_if(self.end)

    def _object(self, reader: TextReader, output: Output, schema: Any, depth: int) -> Steps[bool]:
        """Read an object after its opening brace. Returns True if the call continues."""
        keys = Markers(":", "}", self.end, *output.ends)
        separator = "{"
        while True:
            yield from reader.take_while(_BETWEEN)
            parts: list[str] = []
            mark = yield from reader.until(keys, parts.append)
            if mark is None:
                return False
            if mark != ":":
                output.arguments("{}" if separator == "{" else "}")
                return self._goes_on(reader, mark, "}")
            key = "".join(parts).strip().removeprefix(self.quote).removesuffix(self.quote)
            output.arguments(f"{separator}{json_string(key)}: ")
            separator = ", "
            if not (yield from self._value(reader, output, parameter_schema(schema, key), depth)):
                output.arguments("" if reader.is_ended else "}")
                return False

    def _list(self, reader: TextReader, output: Output, schema: Any, depth: int) -> Steps[bool]:
        items = schema.get("items") if isinstance(schema, dict) else None
        output.arguments("[")
        separator = ""
        while True:
            yield from reader.take_while(_BETWEEN)
            if (yield from reader.take_if("]")):
                output.arguments("]")
                return True
            if not (yield from reader.peek()):
                return False
            for mark in (self.end, "}", *output.ends):
                if (yield from reader.sees(mark)):
                    output.arguments("]")
                    return mark == "}"
            output.arguments(separator)
            separator = ", "
            if not (yield from self._value(reader, output, items, depth)):
                output.arguments("" if reader.is_ended else "]")
                return False

    def _value(self, reader: TextReader, output: Output, schema: Any, depth: int) -> Steps[bool]:
        """Read a value; see `_object`. The schema decides the type of a string where it allows none."""
        yield from reader.space()
        if (yield from reader.take_if(self.quote)):
            yield from self._string(reader, output, schema)
            return not reader.is_ended or bool((yield from reader.peek()))
        first = yield from reader.peek()
        if first == "{" and depth < MAX_DEPTH:
            yield from reader.take()
            return (yield from self._object(reader, output, schema, depth + 1))
        if first == "[" and depth < MAX_DEPTH:
            yield from reader.take()
            return (yield from self._list(reader, output, schema, depth + 1))
        parts: list[str] = []
        mark = yield from reader.until(Markers(",", "}", "]", self.end, *output.ends), parts.append)
        if mark is None:
            return False
        reader.unread(mark)
        output.arguments(coerced("".join(parts).strip(), schema))
        return mark in (",", "}", "]")

    def _string(self, reader: TextReader, output: Output, schema: Any) -> Steps[None]:
        ends = Markers(self.quote)
        types = types_of(schema)
        if is_text(schema, default=True) or "string" in types:
            output.arguments('"')
            mark = yield from reader.until(ends, lambda text: output.arguments(escaped(text)), drops_part=True)
            output.arguments("" if mark is None else '"')
            return
        parts: list[str] = []
        if (yield from reader.until(ends, parts.append)) is not None:
            output.arguments(coerced("".join(parts), schema))

    def _goes_on(self, reader: TextReader, mark: str, closing: str) -> bool:
        if mark != closing:
            reader.unread(mark)
        return mark == closing
