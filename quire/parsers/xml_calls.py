"""Tool calls as tags: Qwen3-Coder, MiniMax-M2, Seed-OSS, DeepSeek-V3.2 (DSML), GLM-4.5 to 4.7.

String parameters stream; others wait for their end and become JSON of a type that the schema allows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from quire.parsers.arguments import (
    coerced,
    escaped,
    is_text,
    json_string,
    object_members,
    parameter_names,
    parameter_schema,
    types_of,
)
from quire.parsers.json_calls import copy_value
from quire.parsers.output import Output
from quire.parsers.reader import Markers, Steps, TextReader, discard
from quire.parsers.reasoning import Break

_HEADER = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^\s"']*))(?:\s+string\s*=\s*"(true|false)")?""")


class _Arguments:
    def __init__(self, output: Output, name: str) -> None:
        self._output = output
        self._schema = output.schemas.get(name)
        self._separator = "{"

    def schema(self, name: str) -> Any:
        return parameter_schema(self._schema, name)

    def key(self, name: str) -> None:
        self._output.arguments(f"{self._separator}{json_string(name)}: ")
        self._separator = ", "

    def lacks(self, name: str) -> bool:
        """True if the tool declares parameters, but not this one."""
        return bool(parameter_names(self._schema)) and self.schema(name) is None

    def unwrap(self, name: str, text: str) -> None:
        """Write the members of the object `text` as arguments; otherwise one argument `name`."""
        members = object_members(text)
        for key, member in ({name: coerced(text, None)} if members is None else members).items():
            self.key(key)
            self._output.arguments(member)

    def close(self) -> None:
        self._output.arguments("{}" if self._separator == "{" else "}")


class _StringValue:
    """String streamed as JSON. trims: a line feed at either end belongs to the tags."""

    def __init__(self, output: Output, *, trims: bool) -> None:
        self._output = output
        self._trims = trims
        self._is_first = True
        self._has_line_feed = False
        output.arguments('"')

    def add(self, text: str) -> None:
        if not self._trims:
            self._output.arguments(escaped(text))
            return
        if self._is_first:
            self._is_first = False
            text = text.removeprefix("\n")
        if not text:
            return
        if self._has_line_feed:
            text = "\n" + text
        self._has_line_feed = text.endswith("\n")
        self._output.arguments(escaped(text.removesuffix("\n")))

    def close(self) -> None:
        self._output.arguments('"')


@dataclass(frozen=True)
class TagFormat:
    """`<call=NAME>` or `<call name="NAME">` around `<parameter=KEY>VALUE</parameter>`, bare or in a section (empty: the
    format has none)."""

    section: str
    section_end: str
    call: str
    call_end: str
    parameter: str
    parameter_end: str
    is_bare: bool = False
    """Calls may stand outside a section."""
    trims: bool = False
    """Values stand on lines of their own."""
    wrappers: frozenset[str] = frozenset()
    """Undeclared parameter names into which models put all arguments as one object."""
    quotes: tuple[str, str] | None = None
    """Optional marks around a value."""

    @property
    def breaks(self) -> tuple[Break, ...]:
        if not self.section:
            return (Break(self.call, named='"{}"'),)
        return (Break(self.section, ((self.call,),)),)

    @property
    def markers(self) -> tuple[str, ...]:
        sections = (self.section, self.section_end) if self.section else ()
        return (*sections, self.call, self.call_end, self.parameter, self.parameter_end, *(self.quotes or ()))

    def parse(self, reader: TextReader, output: Output) -> Steps[None]:
        outside = Markers(*filter(None, (self.section, self.call if self.is_bare else "")))
        inside = Markers(*filter(None, (self.section_end, self.call, *output.ends)))
        while (mark := (yield from output.until(reader, outside))) is not None:
            if mark == self.call:
                yield from self._call(reader, output)
                yield from reader.space()
                yield from reader.take_if(self.section_end)
                continue
            mark = yield from self._enter(reader, output)
            while mark == self.call:
                yield from self._call(reader, output)
                if (yield from reader.sees(self.section)):
                    break
                mark = yield from reader.until(inside, discard)
            if mark in output.ends:
                reader.unread(mark)

    def _enter(self, reader: TextReader, output: Output) -> Steps[str | None]:
        space = yield from reader.space()
        if (yield from reader.take_if(self.call)):
            return self.call
        output.content(self.section + space)
        return None

    def _call(self, reader: TextReader, output: Output) -> Steps[None]:
        header = yield from self._header(reader, output, broken := [self.call])
        if header is None:
            output.content("".join(broken))
            return
        name = header[0]
        output.begin_call(name)
        arguments = _Arguments(output, name)
        yield from reader.space()
        if (yield from reader.peek()) == "{":  # DSML has JSON instead of tags, too
            yield from copy_value(reader, output.arguments)
            mark = yield from reader.until(Markers(self.call_end, *output.ends), discard)
            reader.unread("" if mark is None or mark == self.call_end else mark)
            return
        sections = (self.section_end, self.section) if self.section else (self.call,)
        ends = (*sections, *output.ends)
        marks = Markers(self.parameter, self.call_end, *ends)
        while True:
            mark = yield from reader.until(marks, discard)
            if mark == self.parameter:
                mark = yield from self._parameter(reader, output, arguments)
            if mark is None:
                return
            if mark in (*ends, self.parameter):
                reader.unread(mark)
            if mark in (*ends, self.call_end):
                arguments.close()
                return

    def _header(self, reader: TextReader, output: Output, parts: list[str]) -> Steps[tuple[str, str | None] | None]:
        """(name, the tag's `string` attribute) of a tag up to ">", added to `parts`; None at the text's end."""
        num_before = len(parts)
        mark = yield from reader.until(Markers(">", *output.ends), parts.append)
        if mark != ">":
            reader.unread(mark or "")
            return None
        found = _HEADER.match("".join(parts[num_before:]))
        assert found is not None, "every part of the pattern is optional"
        return (found[1] or found[2] or found[3] or "").strip(), found[4]

    def _parameter(self, reader: TextReader, output: Output, arguments: _Arguments) -> Steps[str | None]:
        """Read a parameter. Returns the tag that ended the value (the next parameter's if its own is missing), or
        None."""
        header = yield from self._header(reader, output, [])
        if header is None:
            return None
        name, is_string = header
        schema = arguments.schema(name)
        ends = Markers(self.parameter_end, self.parameter, self.call_end)
        is_quoted = self.quotes is not None and (yield from reader.take_if(self.quotes[0]))
        if self.quotes is not None and is_quoted:
            ends = Markers(self.quotes[1])
        wraps = name in self.wrappers and arguments.lacks(name)
        if not wraps:
            arguments.key(name)
        if not wraps and _comes_as_text(is_string, schema):
            value = _StringValue(output, trims=self.trims)
            mark = yield from reader.until(ends, value.add, drops_part=True)
            if mark is not None:
                value.close()
            return (yield from self._end(reader, mark))
        parts: list[str] = []
        mark = yield from reader.until(ends, parts.append)
        text = "".join(parts)
        if self.trims:
            text = text.removeprefix("\n").removesuffix("\n")
        if mark is not None and wraps:
            arguments.unwrap(name, text)
        elif mark is not None:
            output.arguments(coerced(text, schema))
        return (yield from self._end(reader, mark))

    def _end(self, reader: TextReader, mark: str | None) -> Steps[str | None]:
        if self.quotes is None or mark != self.quotes[1]:
            return mark
        return (yield from reader.until(Markers(self.parameter_end, self.parameter, self.call_end), discard))


def _comes_as_text(is_string: str | None, schema: Any) -> bool:
    """True if a value is a string from its first character. is_string: the tag's attribute; the schema wins."""
    if is_string == "true":
        types = types_of(schema)
        return not types or "string" in types
    return is_string is None and is_text(schema, default=True)


@dataclass(frozen=True)
class PairFormat:
    """Calls of GLM: the name, then pairs of `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>`."""

    start: str = "<tool_call>"
    end: str = "</tool_call>"
    key: str = "<arg_key>"
    key_end: str = "</arg_key>"
    value: str = "<arg_value>"
    value_end: str = "</arg_value>"

    @property
    def breaks(self) -> tuple[Break, ...]:
        return (Break(self.start),)

    @property
    def markers(self) -> tuple[str, ...]:
        return self.start, self.end, self.key, self.key_end, self.value, self.value_end

    def parse(self, reader: TextReader, output: Output) -> Steps[None]:
        starts, named = Markers(self.start), Markers(self.key, self.end, self.start, *output.ends)
        while (yield from output.until(reader, starts)) is not None:
            parts: list[str] = []
            mark = yield from reader.until(named, parts.append)
            name = "".join(parts).strip()
            if mark not in (self.key, self.end) or not output.may_call(name):
                output.content(self.start + "".join(parts))
                reader.unread(mark or "")
                continue
            output.begin_call(name)
            arguments = _Arguments(output, name)
            while mark == self.key:
                yield from self._pair(reader, output, arguments)
                mark = yield from reader.until(named, discard)
            if mark is not None:
                arguments.close()
                reader.unread("" if mark == self.end else mark)

    def _pair(self, reader: TextReader, output: Output, arguments: _Arguments) -> Steps[None]:
        parts: list[str] = []
        if (yield from reader.until(Markers(self.key_end), parts.append)) is None:
            return
        name = "".join(parts).strip()
        yield from reader.space()
        if not (yield from reader.take_if(self.value)):
            return
        schema = arguments.schema(name)
        ends = Markers(self.value_end, self.end)
        arguments.key(name)
        if is_text(schema, default=False):
            output.arguments('"')
            mark = yield from reader.until(ends, lambda text: output.arguments(escaped(text)), drops_part=True)
            output.arguments("" if mark is None else '"')
        else:
            parts = []
            mark = yield from reader.until(ends, parts.append)
            output.arguments(coerced("".join(parts), schema) if mark is not None else "")
        if mark == self.end:
            reader.unread(mark)
